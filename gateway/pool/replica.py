"""Replicas, and the models that they serve."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Literal

from engine import wire
from gateway.errors import EngineSilent, NotReady
from gateway.pool.client import EngineClient
from gateway.pool.health import Health
from gateway.pool.hedging import Hedges
from gateway.pool.pace import Pace
from gateway.pool.recent_items import RecentItems
from gateway.text.facts import Facts
from gateway.text.vocabulary import Vocabulary

MAX_EJECTED_SHARE = 0.5
"""Largest share of a model's ready replicas that is taken out of use. If more fail, the cause is probably elsewhere, so the
replicas whose ejection ends soonest stay in use."""
AFFINITY_BOUND = 1.25
"""A replica may have this multiple of the mean load plus one request before requests with affinity go elsewhere: consistent
hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, https://arxiv.org/abs/1608.01350."""
SLOW_LOAD = 4
"""A replica that was ejected because it is slow still gets a request if the chosen one would have this multiple of its load."""

State = Literal["ready", "half_open", "ejected", "draining", "unusable", "silent", "not_ready"]


class Wait:
    """Context manager around a task's wait for a pod. After :meth:`end` the block raises :class:`EngineSilent`.

    A stream enters it for every message: it takes 1 µs, and :func:`asyncio.timeout` takes 8 µs.
    """

    __slots__ = ("_cancelling", "_ended", "_task", "_waits")

    def __init__(self, waits: set[Wait]) -> None:
        """``waits`` contains this object while a task is in the block."""
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
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # no other caller cancelled the task
            message = "The engine stopped answering; try again."
            raise EngineSilent(message, retry_after=1, retryable=True) from None

    def end(self) -> None:
        """Cancel the task's wait."""
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()


class Busy:
    """Context manager around a request to a replica. It is no generator, because every request enters it."""

    __slots__ = ("_replica", "_tokens")

    def __init__(self, replica: Replica, tokens: int) -> None:
        self._replica = replica
        self._tokens = tokens

    def __enter__(self) -> None:
        self._replica.in_flight += 1
        self._replica.tokens += self._tokens

    def __exit__(self, *_: object) -> None:
        self._replica.in_flight -= 1
        self._replica.tokens -= self._tokens


@dataclass(eq=False)
class Replica:
    """One engine pod and its state as known to this gateway."""

    client: EngineClient
    source: str = ""
    """Entry of the setting ``engines`` that led to this replica."""
    health: Health = field(default_factory=Health)
    pace: Pace = field(default_factory=Pace)
    ready: bool = False
    """Whether the last probe reported ready."""
    draining: bool = False
    """The pod is terminating or no longer listed: open requests may finish, new ones go elsewhere."""
    gone: bool = False
    """Discovery no longer lists the pod; it is probed while it has open requests."""
    silent: bool = False
    """The pod left a probe unanswered for too long and has answered none since."""
    problem: str | None = None
    """Reason why the model of a ready pod cannot be used; None where there is none."""
    in_flight: int = 0
    """Open requests of this gateway on the pod."""
    tokens: int = 0
    """Tokens of the requests in progress on an engine."""
    unanswered_since: float | None = None
    """Time of the first unanswered probe, on :class:`gateway.pool.silence.AwakeClock`; None if all probes were answered."""
    items: RecentItems = field(default_factory=RecentItems)
    """Items that this gateway has sent to the pod lately."""
    expected: str | None = None
    """Name of the model that the pod reports to load or serve; known before the model is loaded."""
    _waits: set[Wait] = field(default_factory=set)

    @property
    def takes_work(self) -> bool:
        """Whether the pod takes new requests."""
        return self.ready and not self.draining

    @property
    def state(self) -> State:
        """State for metrics."""
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
        """Return a context manager for waiting on the pod. It can be entered several times, one after another."""
        return Wait(self._waits)

    def give_up(self) -> None:
        """End all waits. A stopped process or a lost machine closes no connections, so the waits would not end otherwise."""
        for wait in list(self._waits):
            wait.end()

    def busy(self, tokens: int) -> Busy:
        """Count one request of ``tokens`` while the block runs."""
        return Busy(self, tokens)

    @cached_property
    def seed(self) -> int:
        """A number of 64 bits that is equal for this pod in every gateway."""
        return int.from_bytes(hashlib.blake2b(self.client.url.encode(), digest_size=8).digest(), "little")

    def weight(self, affinity: bytes) -> bytes:
        """Preference of requests with ``affinity`` for this replica; they prefer the replica with the largest weight.

        Rendezvous hashing, Thaler and Ravishankar, https://doi.org/10.1109/90.663936: adding or removing a replica moves only the
        requests that prefer it.
        """
        return hashlib.blake2b(self.client.url.encode(), key=affinity, digest_size=8).digest()


@dataclass(eq=False)
class ServedModel:
    """Replicas that give equal numbers for equal tokens: one name, one fingerprint."""

    info: wire.Info
    tokenizer: Vocabulary
    """Converts token ids to text; worker processes convert text to token ids."""
    text: str
    """Key of the model's tokeniser in the worker processes."""
    replicas: list[Replica] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    """Entries of the setting ``engines`` that last led to this model; it is remembered while its replicas are away."""
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: int = 0
    """Requests that wait for a replica to be ready."""
    hedges: Hedges = field(default_factory=Hedges)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The model name that clients send as ``model``."""
        return self.info.model

    @cached_property
    def context(self) -> int:
        """Largest number of prompt and completion tokens together that an engine takes."""
        return min(self.info.max_context, self.info.limits.max_slots)

    @cached_property
    def facts(self) -> Facts:
        """The model's properties that request parsing needs."""
        return Facts(self.name, self.context, self.info.vocab_size, self.info.limits.max_labels)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica in self.replicas if replica.takes_work]

    @property
    def leaving(self) -> Replica | None:
        """The replica with the fewest tokens in flight of those that terminate and still take requests."""
        return min((each for each in self.replicas if each.ready and each.draining), key=lambda each: each.tokens, default=None)

    @property
    def usable(self) -> list[Replica]:
        """The replicas in :attr:`ready` that should get requests: ejected ones are left out, up to :data:`MAX_EJECTED_SHARE`, and
        half-open ones are included only while they have no open request."""
        ready = self.ready
        out = [replica for replica in ready if replica.health.returns is not None]
        if not out:
            return ready
        out = [replica for replica in out if replica.health.ejected or replica.in_flight]
        out.sort(key=lambda replica: replica.health.returns or 0.0, reverse=True)
        out = out[: int(MAX_EJECTED_SHARE * len(ready))]
        return [replica for replica in ready if replica not in out]

    def choose(
        self, tokens: int, affinity: bytes | None = None, tried: Collection[Replica] = (), preferred: Replica | None = None
    ) -> Replica:
        """Choose a replica outside ``tried`` for a request of ``tokens``. Raises :class:`NotReady`.

        It is ``preferred``, if that takes requests. With ``affinity``, it is the preferred replica among those within the load
        bound. Otherwise it is the one with the fewest tokens in flight, and a random one of equals. If it is busy, a replica that
        was ejected because it is slow may relieve it.
        """
        candidates = [replica for replica in self.usable if replica not in tried]
        if not candidates:
            candidates = [replica for replica in self.ready if replica not in tried]
        if not candidates:
            raise NotReady(f"The model {self.name!r} is not ready; try again soon.", retry_after=1)
        if preferred in candidates:
            return preferred
        chosen = self._best(candidates, tokens, affinity)
        if len(candidates) + len(tried) < len(self.replicas):
            return self._relieved(chosen, tokens, {*candidates, *tried})
        return chosen

    def _relieved(self, chosen: Replica, tokens: int, others: set[Replica]) -> Replica:
        """Return an ejected slow replica outside ``others`` if ``chosen`` has :data:`SLOW_LOAD` times its load, else ``chosen``."""
        slow = [replica for replica in self.ready if replica.health.slow and replica not in others]
        least = min(slow, key=lambda replica: replica.tokens, default=chosen)
        return least if (least.tokens + tokens) * SLOW_LOAD <= chosen.tokens + tokens else chosen

    def _best(self, candidates: list[Replica], tokens: int, affinity: bytes | None) -> Replica:
        if len(candidates) == 1:
            return candidates[0]
        if affinity is not None:
            bound = AFFINITY_BOUND * sum(replica.tokens for replica in candidates) / len(candidates) + tokens
            return max((r for r in candidates if r.tokens <= bound), key=lambda replica: replica.weight(affinity))
        return min(candidates, key=lambda replica: (replica.tokens, os.urandom(4)))

    def refused(self) -> None:
        """Note that a replica had no room for a request: for a while there are no hedges, and slow replicas are in use."""
        self.hedges.refused = asyncio.get_running_loop().time()
        for replica in self.replicas:
            replica.health.forgive()

    def announce(self) -> None:
        """Wake the requests that wait for a replica."""
        self._news.set()
        self._news.clear()

    async def wait_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a ready replica; return whether there is one."""
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not self.ready:
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        return True

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`~gateway.errors.ContextExceeded` unless ``length`` prompt tokens and ``room`` more fit in the context."""
        self.facts.check_prompt(length, param, room=room)
