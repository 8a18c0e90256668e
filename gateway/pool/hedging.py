"""Hedging: a score that is late is also sent to a second replica, and the first answer counts.

A score is late when it has not been answered in the time in which a typical replica of its model answers 95 % of the requests of
its size. The second request is the *hedge*. Jeffrey Dean and Luiz André Barroso, The Tail at Scale,
https://doi.org/10.1145/2408776.2408794.

Hedges must not make a slow model slower. Their tokens are limited to a small part of those computed (:class:`Hedges`), and there
are none while the model has no replica to spare (:meth:`Hedger.second`). A replica that loses several races in a row is ejected
like one that fails, so that a replica that stays slow costs few hedges.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from engine import wire
from gateway.errors import GatewayError
from gateway.ops.metrics import Telemetry

if TYPE_CHECKING:
    from gateway.pool.client import EngineClient
    from gateway.pool.race import Race
    from gateway.pool.replica import Replica, ServedModel

logger = logging.getLogger(__name__)

BURST_TOKENS = 1 << 17
"""Most tokens that hedges may save up; a larger sub-batch gets no hedge. As many as the largest sub-batch usually has."""
MAX_HEDGES = 32
"""Most hedges of a model at a time."""
MIN_SECONDS = 0.005
"""Shortest time before a hedge; in a shorter one, the gateway's own delays are what makes a request late."""
REFUSED_SECONDS = 5.0
"""Time without hedges after a replica has refused a request (429 or 503)."""
QUEUE_SHARE = 0.5
"""A replica whose last request waited in its queue for this part of the time before a hedge has none to spare."""
RESERVE = 4
"""Hedges that the budget must allow before a late request gets one; at twice its delay it gets the last one. Most late requests are
answered soon after the delay, and otherwise those that are very late would find the budget spent."""
REFRESH_SECONDS = 0.25
"""Time for which the delay of a size class is kept."""

Ask = Callable[["EngineClient"], Awaitable[wire.Scored]]


class Hedges:
    """The hedges of one model: their budget, and the delay before each."""

    __slots__ = ("delays", "refused", "running", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        """Tokens that may be spent now. A token bucket that starts empty, so that hedges never exceed their share of the tokens
        computed since the start."""
        self.running = 0
        self.refused = -math.inf
        """Time of the last refusal by a replica, on the event loop's clock."""
        self.delays: dict[int, tuple[float, float | None]] = {}
        """Delay for each size class, and the time until which it is kept."""

    def delay(self, model: ServedModel, size: int, now: float) -> float | None:
        """Return the seconds after which a request of this class is late; None if that is unknown or no other replica is ready.

        It is the lower median over the replicas: a minority of slow replicas does not change it.
        """
        until, delay = self.delays.get(size, (-math.inf, None))
        if now >= until:
            replicas = model.ready
            known = sorted(late for replica in replicas if (late := replica.pace.late_after(size)) is not None)
            delay = max(MIN_SECONDS, known[(len(known) - 1) // 2]) if known and len(replicas) > 1 else None
            self.delays[size] = (now + REFRESH_SECONDS, delay)
        return delay


class Hedge(NamedTuple):
    """How a request is hedged."""

    size: int
    """See :func:`gateway.pool.pace.size_class`."""
    ask: Ask
    """Sends the request to the second replica."""


class Hedger:
    """Decides about hedges, within a budget of ``share`` of the tokens that engines compute."""

    def __init__(
        self, telemetry: Telemetry, record_failure: Callable[[GatewayError, Replica, ServedModel], None], *, share: float
    ) -> None:
        """``record_failure`` updates the health of a replica after an error."""
        self.telemetry = telemetry
        self.record_failure = record_failure
        self._share = share

    def second(self, race: Race, delay: float, *, last: bool) -> Replica | None:
        """Return the replica for the hedge of ``race``, whose tokens are taken from the budget; None if there should be none.
        ``last``: the race does not ask again."""
        second = self._spare(race, delay)
        if second is not None and self._take(race, 1 if last else RESERVE):
            return second
        if last:
            self.telemetry.engines.hedges_denied.labels(race.model.base.name, "budget" if second else "saturation").inc()
        return None

    def earn(self, model: ServedModel, computed: int) -> None:
        """Add to the budget for ``computed`` tokens of an answer."""
        model.hedges.tokens = min(BURST_TOKENS, model.hedges.tokens + self._share * computed)

    def beaten(self, replica: Replica, model: ServedModel) -> None:
        """Note that ``replica`` of ``model`` lost a race against a later request to another."""
        if replica.health.beaten():
            self.telemetry.engines.ejections.labels(model.name).inc()
            logger.warning("engine %s: ejected, slower than others %d times", replica.client.url, replica.health.races_lost)

    def _spare(self, race: Race, delay: float) -> Replica | None:
        """Return the replica that should get the hedge; None if there is none with room for it."""
        model = race.model
        others = [replica for replica in model.usable if replica not in race.tried and replica.health.returns is None]
        if not others or model.waiting or race.loop.time() - model.hedges.refused < REFUSED_SECONDS:
            return None
        second = model.choose(race.tokens, race.affinity, [replica for replica in model.ready if replica not in others])
        busy = second.tokens > race.first.tokens or second.pace.queue_seconds > QUEUE_SHARE * delay
        return None if busy else second

    def _take(self, race: Race, reserve: int) -> bool:
        """Take the tokens of a hedge from the budget, if that allows ``reserve`` of them. Returns whether it did."""
        hedges = race.model.hedges
        if hedges.tokens < race.tokens * reserve or hedges.running >= MAX_HEDGES:
            return False
        hedges.tokens -= race.tokens
        hedges.running += 1
        self.telemetry.engines.hedge_tokens.labels(race.model.base.name).inc(race.tokens)
        return True
