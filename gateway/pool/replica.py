"""Replicas, and the models that they serve together."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from engine import wire
from gateway.errors import ContextExceeded, NotReady
from gateway.pool.client import EngineClient
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Replica:
    """One engine pod and what is known about it."""

    client: EngineClient
    ready: bool = False
    problem: str | None = None
    """Why its model cannot be used, where that is so although the pod is ready."""
    in_flight: int = 0
    """Requests of this gateway that the pod works on."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one request."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


@dataclass(eq=False)
class ServedModel:
    """Replicas that give the same numbers for the same tokens: one name, one fingerprint."""

    info: wire.Info
    tokenizer: Tokenizer
    template: ChatTemplate
    replicas: list[Replica] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """What clients send as ``model``."""
        return self.info.model

    @cached_property
    def context(self) -> int:
        """Longest prompt and completion together that an engine takes, in tokens."""
        return min(self.info.max_context, self.info.limits.max_slots)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica in self.replicas if replica.ready]

    def choose(self, tried: Collection[Replica] = ()) -> Replica:
        """The ready replica with the least to do, none of ``tried``. Raises :class:`NotReady`."""
        candidates = [replica for replica in self.ready if replica not in tried]
        if not candidates:
            raise NotReady(f"The model {self.name!r} is not ready; try again soon.", retry_after=1)
        return min(candidates, key=lambda replica: replica.in_flight)

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`ContextExceeded` unless a prompt of ``length`` tokens and ``room`` more fit in the context."""
        if length + room > self.context:
            and_room = " and leaves no room for an answer" if room else ""
            raise ContextExceeded(
                f"`{param}`: the prompt is {length} tokens long{and_room}; the context of {self.name!r} holds {self.context}."
                " Shorten it: a prompt is never cut.",
                param=param,
            )
