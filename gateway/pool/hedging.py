"""Hedging: a score that is late is also sent to a second replica, and the first answer counts.

A score is late when it has not been answered in :data:`LATE` times the time in which a typical replica of its model answers 95 % of
the requests of its size. The second request is the *hedge*. Jeffrey Dean and Luiz André Barroso, The Tail at Scale,
https://doi.org/10.1145/2408776.2408794.

Hedges must not make a slow model slower: their tokens are limited to a small part of those computed, and there are none while the
model has no replica to spare. A race that the first replica loses counts as its failure (:class:`gateway.pool.replica.Health`), so
a replica that stays slow is ejected and costs few hedges.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import GatewayError
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import Stage, attempt
from yardstick_llm.gateway.pool.replica import Replica, ServedModel

logger = logging.getLogger(__name__)

LATE = 1.5
"""Requests after the 95 % that are only a little late would otherwise spend the budget of those that are very late."""
BURST_TOKENS = 1 << 17
"""Most tokens that hedges may save up; a larger sub-batch gets no hedge. As many as the largest sub-batch usually has."""
MAX_HEDGES = 32
"""Most hedges of a model at a time."""
MIN_SECONDS = 0.005
"""Shortest time before a hedge; in a shorter one, the gateway's own delays are what makes a request late."""
REFRESH_SECONDS = 0.25
"""Time for which the delay of a size class is kept."""
QUANTILE = 0.95
LEAST_SECONDS = 0.0005
STEPS = 4
"""Buckets for each doubling of the time, so a quantile is at most 19 % too long."""
BUCKETS = 84
"""Up to :data:`LEAST_SECONDS` · 2^21, 17 minutes."""
WINDOW = 512
"""Number of answers after which all counts are halved."""
MIN_ANSWERS = 20
"""Least number of answers of which a quantile is known."""

Ask = Callable[[Replica, Stage | None], Awaitable[wire.Scored]]
"""Sends a request to a replica, with the context of a span."""


class Hedge(NamedTuple):
    """How a request is hedged."""

    size: int
    """See :func:`size_class`."""
    ask: Ask
    """Sends the request to the second replica."""


class Quantile:
    """The time in which a replica gives most answers: a histogram with logarithmic buckets that forgets old observations."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        place = int(STEPS * math.log2(seconds / LEAST_SECONDS)) if seconds > LEAST_SECONDS else 0
        self._counts[min(place, BUCKETS - 1)] += 1
        self._total += 1
        if self._total >= WINDOW:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    @property
    def value(self) -> float | None:
        """The quantile, in seconds; None while there are too few observations."""
        if self._total < MIN_ANSWERS:
            return None
        above = 0.0
        for place in range(BUCKETS - 1, -1, -1):
            above += self._counts[place]
            if above > (1 - QUANTILE) * self._total:
                break
        return LEAST_SECONDS * math.exp2((place + 1) / STEPS)


@dataclass(slots=True)
class _SizeClass:
    """Requests of a model whose times are comparable."""

    answers: WeakKeyDictionary[Replica, Quantile] = field(default_factory=WeakKeyDictionary)
    delay: float | None = None
    until: float = -math.inf
    """Time until which :attr:`delay` is kept."""


@dataclass(slots=True)
class _Model:
    """The hedges of one model."""

    tokens: float = 0.0
    """Tokens that may be spent now. A token bucket that starts empty, so that hedges never exceed their share of the tokens
    computed since the start."""
    running: int = 0
    sizes: dict[int, _SizeClass] = field(default_factory=dict)


class Hedger:
    """Sends hedges, within a budget of ``share`` of the tokens that engines compute."""

    def __init__(
        self, telemetry: Telemetry, record_failure: Callable[[GatewayError, Replica, ServedModel], None], *, share: float
    ) -> None:
        """``record_failure`` updates the health of a replica after an error."""
        self._telemetry = telemetry
        self._record_failure = record_failure
        self._share = share
        self._models: WeakKeyDictionary[ServedModel, _Model] = WeakKeyDictionary()

    async def ask(
        self,
        model: ServedModel,
        first: Replica,
        ask: Ask,
        hedge: Hedge,
        *,
        tokens: int,
        tried: list[Replica],
        number: int = 1,
    ) -> wire.Scored:
        """Return the answer of ``first``, or of a second replica that answers before it. Raises :class:`GatewayError` of the first
        replica if there is none. ``tried``: replicas that must not get the request again; the second one is added. ``number``: of
        the attempt, in traces.

        The first request runs in the caller's task, because few requests are late. The hedge has a task, whose answer ends the
        wait.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        if (state := self._models.get(model.base)) is None:
            state = self._models[model.base] = _Model()
        if (size := state.sizes.get(hedge.size)) is None:
            size = state.sizes[hedge.size] = _SizeClass()
        delay, wait = self._delay(model, size, began), first.wait()
        second: asyncio.Task[wire.Scored] | None = None
        timer: asyncio.TimerHandle | None = None
        won = False

        def late(due: float) -> None:
            nonlocal second, timer
            if (now := loop.time()) - due > MIN_SECONDS:  # this gateway was blocked, and the answer may have arrived meanwhile
                timer = loop.call_at(2 * now - due, late, 2 * now - due)
            elif (spare := self._spare(model, state, first, tokens, tried)) is not None:
                tried.append(spare)
                second = loop.create_task(self._second(model, state, spare, hedge, tokens=tokens, number=number + 1))
                second.add_done_callback(answered)

        def answered(second: asyncio.Task[wire.Scored]) -> None:
            nonlocal won
            if not second.cancelled() and second.exception() is None:
                won = True
                wait.end()

        if delay is not None:
            timer = loop.call_at(began + delay, late, began + delay)
        try:
            with attempt(first.client.url, model.name, number, tokens) as span, first.busy(tokens), wait:
                answer = await ask(first, span)
        except GatewayError as error:
            if second is None:
                raise
            beaten = won  # the error is that of a wait that the second answer has ended
            try:
                answer = await second
            except GatewayError:
                raise error from None
            won = True
            if not beaten:
                self._record_failure(error, first, model)
                return answer
            self._record(first, size, loop.time() - began)
            if first.health.failed(slow=True):
                self._telemetry.engines.ejections.labels(model.name).inc()
                logger.warning("engine %s: ejected, slower than others %d times", first.client.url, first.health.failures)
            return answer
        finally:
            if timer is not None:
                timer.cancel()
            if second is not None:
                await self._end(model, state, second, won=won)
        seconds = loop.time() - began
        self._record(first, size, seconds)
        if delay is None or seconds <= delay or not first.health.slow:  # a late answer does not make up for lost races
            first.health.succeeded()
        state.tokens = min(BURST_TOKENS, state.tokens + self._share * answer.computed_tokens)
        return answer

    async def _second(
        self, model: ServedModel, state: _Model, second: Replica, hedge: Hedge, *, tokens: int, number: int
    ) -> wire.Scored:
        began = asyncio.get_running_loop().time()
        try:
            with attempt(second.client.url, model.name, number, tokens) as span, second.busy(tokens), second.wait():
                if span is not None:
                    span.attributes["yardstick.hedge"] = True
                answer = await hedge.ask(second, span)
        except GatewayError as error:
            self._record_failure(error, second, model)
            raise
        self._record(second, state.sizes[hedge.size], asyncio.get_running_loop().time() - began)
        second.health.succeeded()
        return answer

    async def _end(self, model: ServedModel, state: _Model, second: asyncio.Task[wire.Scored], *, won: bool) -> None:
        """End the hedge, which closes its connection, and count its result."""
        state.running -= 1
        if not second.done():
            second.cancel()
            await asyncio.wait({second})
        failed = not second.cancelled() and (error := second.exception()) is not None
        if failed and not isinstance(error, GatewayError):
            logger.error("a hedge failed", exc_info=error)
        self._telemetry.engines.hedges.labels(model.base.name, "failed" if failed else "won" if won else "lost").inc()

    def _delay(self, model: ServedModel, size: _SizeClass, now: float) -> float | None:
        """Return the seconds after which a request of this class is late; None if that is unknown or no other replica is ready.

        It follows the lower median over the replicas: a minority of slow replicas does not change it.
        """
        if now >= size.until:
            quantiles = [quantile for replica in model.ready if (quantile := size.answers.get(replica)) is not None]
            known = sorted(seconds for quantile in quantiles if (seconds := quantile.value) is not None)
            several = len(model.ready) > 1
            size.delay = max(MIN_SECONDS, LATE * known[(len(known) - 1) // 2]) if known and several else None
            size.until = now + REFRESH_SECONDS
        return size.delay

    def _spare(self, model: ServedModel, state: _Model, first: Replica, tokens: int, tried: list[Replica]) -> Replica | None:
        """Return the replica for a hedge of ``tokens``, which are taken from the budget; None if there should be none."""
        others = [replica for replica in model.usable if replica not in tried and replica.health.returns is None]
        second = min(others, key=lambda replica: replica.tokens, default=None)
        if second is None or second.tokens > first.tokens:
            self._telemetry.engines.hedges_denied.labels(model.base.name, "saturation").inc()
            return None
        if state.tokens < tokens or state.running >= MAX_HEDGES:
            self._telemetry.engines.hedges_denied.labels(model.base.name, "budget").inc()
            return None
        state.tokens -= tokens
        state.running += 1
        self._telemetry.engines.hedge_tokens.labels(model.base.name).inc(tokens)
        return second

    @staticmethod
    def _record(replica: Replica, size: _SizeClass, seconds: float) -> None:
        if (quantile := size.answers.get(replica)) is None:
            quantile = size.answers[replica] = Quantile()
        quantile.add(seconds)


def size_class(message: wire.Score | wire.ScoreItems, tokens: int) -> int:
    """Return the class of requests whose times are comparable with those of ``message``: one kind, and up to twice the tokens.
    There are less than a hundred classes."""
    kind = 1 if isinstance(message, wire.ScoreItems) else 2 if isinstance(message.readout, wire.LengthValue) else 0
    return kind << 5 | min(tokens.bit_length(), 31)
