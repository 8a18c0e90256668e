"""Replicas, and the models that they serve."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic, time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineSilent, InternalError, InvalidRequest, NotReady
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.placement import weight
from yardstick_llm.gateway.presets.preset import Fitted, Task, names_a_task
from yardstick_llm.gateway.text.prepared import Facts
from yardstick_llm.gateway.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from yardstick_llm.gateway.pool.adapters import AdapterModel

MAX_EJECTED_SHARE = 0.5
"""Largest share of a model's ready replicas that is taken out of use. If more fail, the cause is probably elsewhere, so the
replicas whose ejection ends soonest stay in use."""
LONGEST_EJECTION = 60.0
"""Longest nominal ejection in seconds, before jitter."""
AFFINITY_BOUND = 1.25
"""A replica may have this multiple of the mean load plus the request before requests with affinity go elsewhere: consistent
hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, https://arxiv.org/abs/1608.01350."""
SLOW_LOAD = 4
"""A replica that was ejected because it is slow still gets a request if the chosen one would have this multiple of its load."""
MAX_SPOILT = 8
"""Answers in succession in which nothing is a number, from which on an engine is at fault, and not the prompts."""
ENDPOINTS: dict[str, str] = {"score": "/v1/score", "generate": "/v1/chat/completions", "length_guidance": "/v1/length"}
"""The main endpoint of each capability, for error messages."""
BY_PRESET: dict[Task, str] = {"rerank": "/v1/rerank", "classify": "/v1/classify", "embed": "/v1/embeddings"}
"""Endpoints that need a preset."""

State = Literal["ready", "half_open", "ejected", "draining", "unusable", "silent", "not_ready"]


@dataclass(slots=True)
class Health:
    """Circuit breaker of one replica: repeated failures eject it for a while, then one trial request decides. The replica is in
    use, ejected (until :attr:`returns`), or half open (from then until a trial request ends)."""

    tolerance: int = 3
    """Consecutive failures that eject a replica."""
    seconds: float = 5.0
    """Length of the first ejection, in seconds; each failed trial doubles it."""
    failures: int = 0
    """Consecutive failures."""
    slow: bool = False
    """Whether each of these was a race that the replica lost (:mod:`gateway.pool.hedging`)."""
    ejections: int = 0
    """Consecutive ejections."""
    returns: float | None = None
    """Time at which the next trial may begin, on the monotonic clock; None while the replica is in use."""

    @property
    def ejected(self) -> bool:
        """Whether the replica is ejected now."""
        return self.returns is not None and monotonic() < self.returns

    @property
    def half_open(self) -> bool:
        """Whether a trial is due or running."""
        return self.returns is not None and monotonic() >= self.returns

    def succeeded(self) -> None:
        """Record an answer in time."""
        self.failures = self.ejections = 0
        self.slow = False
        self.returns = None

    def failed(self, *, slow: bool = False) -> bool:
        """Record a failure that is the replica's fault, or a lost race (``slow``). Returns whether it ejected the replica."""
        self.slow = slow and (self.slow or not self.failures)
        self.failures += 1
        if self.ejected or (self.failures < self.tolerance and not self.half_open):
            return False
        wait = min(self.seconds * 2**self.ejections, LONGEST_EJECTION)
        self.returns = monotonic() + wait * random.uniform(0.8, 1.2)
        self.ejections += 1
        return True


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
        task, self._task = self._task, None
        if not self._ended:
            return
        assert task is not None
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:  # no other caller cancelled the task
            message = "The engine stopped answering; try again."
            raise EngineSilent(message, retry_after=1, retryable=True) from None

    def end(self) -> None:
        """Cancel the task's wait, if it is in the block."""
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
    """Time of the first unanswered probe, on :class:`gateway.pool.pool.AwakeClock`; None if all probes were answered."""
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
    stats: wire.Stats | None = None
    """Counters that the pod reported last."""
    spoilt_answers: int = 0
    """Answers in succession that had no number."""
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

    def judge(self, *, spoilt: bool) -> InternalError | None:
        """Count one answer of the pod. ``spoilt``: it has no number. Returns an error after :data:`MAX_SPOILT` spoilt answers in
        succession, otherwise None."""
        self.spoilt_answers = self.spoilt_answers + 1 if spoilt else 0
        if self.spoilt_answers < MAX_SPOILT:
            return None
        return InternalError("The engine's answers are not numbers; its model may be broken.", retryable=True)

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
    created: int = field(default_factory=lambda: int(time()))
    waiting: int = 0
    """Requests that wait for a replica to be ready."""
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

    @property
    def gone(self) -> bool:
        """Whether the model is an adapter that is unloaded."""
        return False

    def lacks(self, replica: Replica) -> None:
        """Note that ``replica`` does not have the adapter of a request."""

    @cached_property
    def context(self) -> int:
        """Largest number of prompt and completion tokens together that an engine takes, and that the preset of a model that only
        reads allows."""
        fitted = self.tokenizer.table.fitted
        own = None if fitted is None or "generate" in self.info.capabilities else fitted.preset.max_length
        return min(self.info.max_context, self.info.limits.max_slots, own or self.info.max_context)

    @cached_property
    def facts(self) -> Facts:
        """The model's properties that request parsing needs."""
        info = self.info
        return Facts(self.name, self.context, info.vocab_size, info.limits.max_labels, info.vision, info.encoder)

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
            candidates = candidates or [replica for replica in self.ready if replica not in tried]
        if not candidates:
            raise NotReady(f"The model {self.name!r} is not ready; try again soon.", retry_after=1)
        if preferred in candidates:
            return preferred
        if len(candidates) == 1:
            chosen = candidates[0]
        elif affinity is not None:
            mean = sum([replica.tokens for replica in candidates]) / len(candidates)
            bound = AFFINITY_BOUND * mean + (tokens if saves is None else saves)
            digest = int.from_bytes(hashlib.blake2b(affinity, digest_size=8).digest(), "little")
            chosen = max([each for each in candidates if each.tokens <= bound], key=lambda each: weight(digest, each.seed))
        else:
            least = min([replica.tokens for replica in candidates])
            chosen = random.choice([replica for replica in candidates if replica.tokens == least])
        if len(candidates) + len(tried) < len(self.replicas):
            slow = [each for each in self.ready if each.health.slow and each not in candidates and each not in tried]
            relief = min(slow, key=lambda each: each.tokens, default=chosen)
            if (relief.tokens + tokens) * SLOW_LOAD <= chosen.tokens + tokens:
                return relief
        return chosen

    def refused(self) -> None:
        """Note that a replica had no room for a request: slow replicas are in use again."""
        for replica in self.replicas:
            if replica.health.slow:
                replica.health.succeeded()

    def announce(self) -> None:
        """Wake the requests that wait for a replica, with or without an adapter."""
        self._news.set()
        self._news.clear()
        for adapter in self.adapters.values():
            adapter.announce()

    async def wait_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a ready replica, or until the adapter is unloaded; return whether there is one."""
        self.base.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not self.has_ready and not self.gone:
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self.base.waiting -= 1
        return self.has_ready


def paths_of(model: ServedModel) -> str:
    """Return the paths that ``model`` serves, separated by commas."""
    fitted = model.tokenizer.table.fitted
    by_preset = [
        path for task, path in BY_PRESET.items() if fitted is not None and fitted.serves(task) and not refused(model, task)
    ]
    able = [ENDPOINTS[capability] for capability in model.info.capabilities if capability in ENDPOINTS]
    return ", ".join([*by_preset, *able]) or "no request until the operator chooses a preset"


def refused(model: ServedModel, task: Task) -> bool:
    """Whether :func:`check_fallback` refuses ``task``."""
    return model.preset_is_fallback and task != "embed" and (names_a_task(model.name) or names_a_task(model.base.name))


def check_fallback(fitted: Fitted, model: ServedModel, task: Task) -> None:
    """Raise :class:`InvalidRequest` if ``fitted``, the preset of ``model``, is a fallback for a reranker, guard or reward model, or
    for an adapter that is one or changes one, because the prompt of its training is unknown."""
    if refused(model, task):
        raise InvalidRequest(
            f"No preset is for the model {model.name!r}, which may need the prompt of its training. The operator can choose "
            f"one with the setting `presets`; {model.name}={fitted.preset.name} keeps the fallback.",
            param="model",
        )
