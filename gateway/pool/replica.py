"""Replicas, and the models that they serve."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from engine import wire
from gateway.errors import NotReady
from gateway.pool.busy import Busy, Wait
from gateway.pool.client import EngineClient
from gateway.pool.health import Health
from gateway.pool.hedging import Hedges
from gateway.pool.pace import Pace
from gateway.pool.weights import weight
from gateway.text.bounds import Facts
from gateway.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from gateway.pool.adapter_model import AdapterModel

MAX_EJECTED_SHARE = 0.5
"""Largest share of a model's ready replicas that is taken out of use. If more fail, the cause is probably elsewhere, so the
replicas whose ejection ends soonest stay in use."""
AFFINITY_BOUND = 1.25
"""A replica may have this multiple of the mean load plus the request before requests with affinity go elsewhere: consistent
hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, https://arxiv.org/abs/1608.01350."""
SLOW_LOAD = 4
"""A replica that was ejected because it is slow still gets a request if the chosen one would have this multiple of its load."""

State = Literal["ready", "half_open", "ejected", "draining", "unusable", "silent", "not_ready"]


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
    expected: str | None = None
    """Name of the model that the pod reports to load or serve; known before the model is loaded."""
    adapters: dict[str, wire.Adapter] = field(default_factory=dict)
    """Adapters that the pod has, by name, as last reported."""
    adapters_revision: str | None = None
    """Revision of :attr:`adapters`; None if it is unknown, or the pod has none."""
    takes_adapters: bool = True
    """Whether the pod is asked for its adapters; False for one that has answered that it takes none."""
    adapters_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the pod's adapters are asked for, so that an older answer never replaces a newer one."""
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

    def leave(self) -> None:
        """Note that discovery no longer lists the pod."""
        self.draining = self.gone = True

    def busy(self, tokens: int) -> Busy:
        """Count one request of ``tokens`` while the block runs."""
        return Busy(self, tokens)

    @cached_property
    def seed(self) -> int:
        """A number of 64 bits that is equal for this pod in every gateway."""
        return int.from_bytes(hashlib.blake2b(self.client.url.encode(), digest_size=8).digest(), "little")


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
    adapters: dict[tuple[str, str], AdapterModel] = field(default_factory=dict)
    """Adapters of this model that replicas have, by name and digest."""
    preset_is_fallback: bool = False
    """Whether its preset was taken because no other is for the model."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The model name that clients send as ``model``."""
        return self.info.model

    @property
    def base(self) -> ServedModel:
        """The model itself; of an adapter, the model that it changes."""
        return self

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter, for messages to engines; empty for a model without one."""
        return ""

    def with_adapter(self, digest: str) -> ServedModel | None:
        """Return this model with the adapter of ``digest``, or without one if it is empty; None if no replica has it."""
        return next((each for each in self.adapters.values() if each.adapter_digest == digest), None) if digest else self

    def lacks(self, replica: Replica) -> None:
        """Note that ``replica`` does not have the adapter of a request."""

    @cached_property
    def context(self) -> int:
        """Largest number of prompt and completion tokens together that an engine takes."""
        return min(self.info.max_context, self.info.limits.max_slots)

    @cached_property
    def facts(self) -> Facts:
        """The model's properties that request parsing needs."""
        return Facts(self.name, self.context, self.info.vocab_size, self.info.limits.max_labels, self.info.vision)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica in self.replicas if replica.ready and not replica.draining]

    @property
    def has_ready(self) -> bool:
        """Whether a replica takes requests."""
        for replica in self.replicas:  # noqa: SIM110 - a generator costs more than the rest where the first one is ready
            if replica.ready and not replica.draining:
                return True
        return False

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

    def check_served(self) -> None:
        """Raise :class:`GatewayError` if no replica will have the model again."""

    def choose(
        self,
        tokens: int,
        affinity: bytes | None = None,
        tried: Collection[Replica] = (),
        preferred: Replica | None = None,
        saves: int | None = None,
    ) -> Replica:
        """Choose a replica outside ``tried`` for a request of ``tokens``. Raises :class:`NotReady`.

        It is ``preferred``, if that takes requests. With ``affinity``, it is the preferred replica among those within the load
        bound. Otherwise it is the one with the fewest tokens in flight, and a random one of equals. If it is busy, a replica that
        was ejected because it is slow may relieve it. ``saves``: tokens that the prefix cache of the replica with affinity saves
        at most, by which its load may be larger; ``tokens`` if it is None.
        """
        self.check_served()
        candidates = self.usable
        if tried:
            candidates = [replica for replica in candidates if replica not in tried]
        if not candidates:
            candidates = [replica for replica in self.ready if replica not in tried]
        if not candidates:
            raise NotReady(f"The model {self.name!r} is not ready; try again soon.", retry_after=1)
        if preferred in candidates:
            return preferred
        chosen = self._best(candidates, tokens if saves is None else saves, affinity)
        if len(candidates) + len(tried) < len(self.replicas):
            return self._relieved(chosen, tokens, {*candidates, *tried})
        return chosen

    def _relieved(self, chosen: Replica, tokens: int, others: set[Replica]) -> Replica:
        """Return an ejected slow replica outside ``others`` if ``chosen`` has :data:`SLOW_LOAD` times its load, else ``chosen``."""
        slow = [replica for replica in self.ready if replica.health.slow and replica not in others]
        least = min(slow, key=lambda replica: replica.tokens, default=chosen)
        return least if (least.tokens + tokens) * SLOW_LOAD <= chosen.tokens + tokens else chosen

    def _best(self, candidates: list[Replica], saves: int, affinity: bytes | None) -> Replica:
        if len(candidates) == 1:
            return candidates[0]
        if affinity is not None:
            bound = AFFINITY_BOUND * sum([replica.tokens for replica in candidates]) / len(candidates) + saves
            digest = int.from_bytes(hashlib.blake2b(affinity, digest_size=8).digest(), "little")
            return max([r for r in candidates if r.tokens <= bound], key=lambda replica: weight(digest, replica.seed))
        least = min([replica.tokens for replica in candidates])
        return random.choice([replica for replica in candidates if replica.tokens == least])

    def refused(self) -> None:
        """Note that a replica had no room for a request: for a while there are no hedges, and slow replicas are in use."""
        self.hedges.refused = asyncio.get_running_loop().time()
        for replica in self.replicas:
            replica.health.forgive()

    def announce(self) -> None:
        """Wake the requests that wait for a replica, with or without an adapter."""
        self._news.set()
        self._news.clear()
        for adapter in self.adapters.values():
            adapter.announce()

    async def wait_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a ready replica; return whether there is one."""
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not self.has_ready:
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        return True

    def check_prompt(self, length: int, param: str, *, room: int = 0) -> None:
        """Raise :class:`~gateway.errors.ContextExceeded` unless ``length`` prompt tokens and ``room`` more fit in the context."""
        self.facts.check_prompt(length, param, room=room)
