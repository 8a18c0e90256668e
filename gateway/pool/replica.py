"""Replicas, and the models that they serve together."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Literal

from engine import wire
from gateway.errors import EngineSilent, NotReady
from gateway.pool.client import EngineClient
from gateway.pool.health import Health
from gateway.text.facts import Facts
from gateway.text.vocabulary import Vocabulary

MAX_EJECTED_SHARE = 0.5
"""Of a model's ready replicas; when more fail, the fault is likely not theirs, and those that return soonest stay in use."""
AFFINITY_BOUND = 1.25
"""A replica may have so many times the mean load, and one request more, before requests that prefer it go elsewhere: consistent
hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, https://arxiv.org/abs/1608.01350."""

State = Literal["ready", "half_open", "ejected", "draining", "unusable", "silent", "not_ready"]


class Wait:
    """A block in which a task waits for a pod. Raises :class:`EngineSilent` from it after :meth:`end`.

    A stream enters one for every message: it takes 1 µs, where :func:`asyncio.timeout` takes 8.
    """

    __slots__ = ("_cancelling", "_ended", "_task", "_waits")

    def __init__(self, waits: set[Wait]) -> None:
        """``waits`` has it while the task is in the block."""
        self._waits = waits
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._ended = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.discard(self)
        if not self._ended:
            return
        assert self._task is not None
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # and nobody else cancelled it
            message = "The engine does not answer any more; try again."
            raise EngineSilent(message, retry_after=1, retryable=True) from None

    def end(self) -> None:
        """Cancel what the task waits for."""
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()


@dataclass(eq=False)
class Replica:
    """One engine pod and what is known about it."""

    client: EngineClient
    source: str = ""
    """The entry of the setting ``engines`` that it was found by."""
    health: Health = field(default_factory=Health)
    ready: bool = False
    """By its own account, when last asked."""
    draining: bool = False
    """It is about to end, or is gone from where it was found: what runs there may finish."""
    gone: bool = False
    """Discovery lists it no longer; it is probed as long as it has requests."""
    silent: bool = False
    """It has left a probe unanswered for too long and has answered none since."""
    problem: str | None = None
    """Why its model cannot be used, where that is so although the pod is ready."""
    in_flight: int = 0
    """Requests of this gateway that the pod works on."""
    tokens: int = 0
    """Of those requests."""
    unanswered_since: float | None = None
    """When the first probe was sent that it has not answered, by :class:`gateway.pool.silence.AwakeClock`; None where it has
    answered all."""
    expected: str | None = None
    """The model that it says it is loading or serves; known before the model is loaded."""
    _waits: set[Wait] = field(default_factory=set)

    @property
    def takes_work(self) -> bool:
        """Whether it would answer."""
        return self.ready and not self.draining

    @property
    def state(self) -> State:
        """In a word."""
        if self.draining:
            return "draining"
        if self.problem is not None:
            return "unusable"
        if self.silent:
            return "silent"
        if not self.ready:
            return "not_ready"
        return "ejected" if self.health.ejected else "half_open" if self.health.half_open else "ready"

    def wait(self) -> Wait:
        """A wait for the pod, to be used with ``with``, also more than once."""
        return Wait(self._waits)

    def give_up(self) -> None:
        """End all waits: a process that is stopped, or whose machine is gone, closes no connections."""
        for wait in list(self._waits):
            wait.end()

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        """Count one request."""
        self.in_flight += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.in_flight -= 1
            self.tokens -= tokens

    def weight(self, affinity: bytes) -> bytes:
        """How much requests of ``affinity`` prefer this replica: of all they prefer the one with the most.

        Rendezvous hashing, Thaler and Ravishankar, https://doi.org/10.1109/90.663936: a replica that comes or goes moves only the
        requests that prefer it.
        """
        return hashlib.blake2b(self.client.url.encode(), key=affinity, digest_size=8).digest()


@dataclass(eq=False)
class ServedModel:
    """Replicas that give the same numbers for the same tokens: one name, one fingerprint."""

    info: wire.Info
    tokenizer: Vocabulary
    """Token ids to text; texts become token ids in worker processes."""
    text: str
    """Key of the model's text side in the worker processes."""
    replicas: list[Replica] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    """Entries of the setting ``engines`` that it was last seen behind; it is remembered while its replicas are away."""
    created: int = field(default_factory=lambda: int(time.time()))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """What clients send as ``model``."""
        return self.info.model

    @cached_property
    def context(self) -> int:
        """Longest prompt and completion together that an engine takes, in tokens."""
        return min(self.info.max_context, self.info.limits.max_slots)

    @cached_property
    def facts(self) -> Facts:
        """What reading a request needs to know."""
        return Facts(self.name, self.context, self.info.vocab_size, self.info.limits.max_labels)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica in self.replicas if replica.takes_work]

    @property
    def usable(self) -> list[Replica]:
        """Those of them that should get some: without the ejected ones, as far as the cap on their share allows, and with those on
        trial only while they have nothing to do."""
        ready = self.ready
        out = [replica for replica in ready if replica.health.returns is not None]
        if not out:
            return ready
        out = [replica for replica in out if replica.health.ejected or replica.in_flight]
        out.sort(key=lambda replica: replica.health.returns or 0.0, reverse=True)
        out = out[: int(MAX_EJECTED_SHARE * len(ready))]
        return [replica for replica in ready if replica not in out]

    def choose(self, tokens: int, affinity: bytes | None = None, tried: Collection[Replica] = ()) -> Replica:
        """A replica for a request of ``tokens``, none of ``tried``. Raises :class:`NotReady`.

        With ``affinity`` the one that is preferred, of those that have not too much to do; else the one with the fewest tokens in
        flight, any of them where there are several.
        """
        candidates = [replica for replica in self.usable if replica not in tried]
        if not candidates:
            candidates = [replica for replica in self.ready if replica not in tried]
        if not candidates:
            raise NotReady(f"The model {self.name!r} is not ready; try again soon.", retry_after=1)
        if len(candidates) == 1:
            return candidates[0]
        if affinity is not None:
            bound = AFFINITY_BOUND * sum(replica.tokens for replica in candidates) / len(candidates) + tokens
            return max((r for r in candidates if r.tokens <= bound), key=lambda replica: replica.weight(affinity))
        return min(candidates, key=lambda replica: (replica.tokens, os.urandom(4)))

    def announce(self) -> None:
        """Wake those who wait for a replica."""
        self._news.set()
        self._news.clear()

    async def wait_ready(self, seconds: float) -> bool:
        """Whether a replica takes requests, within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while not self.ready:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`~gateway.errors.ContextExceeded` unless ``length`` prompt tokens and ``room`` more fit in the context."""
        self.facts.check_prompt(length, param, room=room)
