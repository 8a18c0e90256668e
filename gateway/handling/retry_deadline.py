"""Waits of a request in many parts for engines that are away: giving up would lose all parts that are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gateway.errors import EngineLost, EngineSilent, GatewayError, NotReady, Overloaded
from gateway.ops.metrics import Telemetry

RETRY_SECONDS = 0.25
"""Pause before a part is sent again. :class:`gateway.pool.dispatch.Dispatcher` waits for a ready engine by itself, but refuses at
once when too many requests wait."""
MOST_LOSSES = 3
"""Times that engines may be lost while they compute one part: the part may be the reason."""

_AWAY = NotReady, Overloaded
_LOST = EngineLost, EngineSilent

T = TypeVar("T")


@dataclass(frozen=True)
class RetryDeadline:
    """Sends a part of a request again after engines were away, full or lost. Other failures are raised at once."""

    telemetry: Telemetry
    seconds: float
    """Longest time from the first failure of a part on. The last attempt may take longer, by the time that a request waits for a
    ready engine."""

    async def score(self, part: Callable[[], Awaitable[T]], model: str) -> T:
        """Return the result of ``part``, which may be called several times. Raises :class:`GatewayError`."""
        until: float | None = None
        losses = 0
        while True:
            try:
                return await part()
            except GatewayError as error:
                now = time.monotonic()
                until = now + self.seconds if until is None else until
                losses += isinstance(error, _LOST)
                if not isinstance(error, _AWAY + _LOST) or now >= until or losses > MOST_LOSSES:
                    raise
                self.telemetry.engines.retries.labels(model, error.code or error.type).inc()
            await asyncio.sleep(min(RETRY_SECONDS, until - now))
