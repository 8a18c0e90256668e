"""Runs Redis commands within a time limit, behind a circuit breaker. The first failure opens it; a background task closes it again.

While the breaker is open, commands fail at once: when Redis goes away, a request loses at most one time limit, and later requests
lose nothing. Opening at the first failure is acceptable because the first probe follows within a quarter of a second.

Before that, idle connections are closed: after a failover they may lead to the old primary, which answers and takes no writes,
while its address leads to the new one.

A Redis without memory refuses what would take more, and answers everything else, so that is no reason to open the breaker. Nor is
one that cannot save to its disk: it refuses all that would change something, and PING (``stop-writes-on-bgsave-error``, AOF).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import OutOfMemoryError, ResponseError

from gateway.ops.metrics import Telemetry
from gateway.redis.connect import Client, close, drop_idle

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0
"""Pauses between two probes while Redis is away; they double from the first to the longest."""
STABLE_SECONDS = 30.0
"""If Redis fails again within this time, the pauses continue to double: one of several nodes may be down, or a command may be
forbidden, which a probe does not detect."""
PROBE_SECONDS = 2.0
"""Time limit of the first PING on a new connection. A second PING must be answered within the limit of a request."""
LATE_FACTOR = 1.5
"""A timeout that fires later than this multiple of its limit means that this process was busy; Redis may have answered in time."""
LATE_IN_A_ROW = 3
FULL_LOG_SECONDS = 60.0
"""Shortest time between two lines of the log that tell of a full Redis."""
_REMEDIES = {
    "full": "Redis has no memory left: raise its maxmemory, or delete catalogues; it is read and not written",
    "disk": "Redis cannot save to its disk: make room there, and read its log; it is read and not written",
}
"""By kind of error."""

T = TypeVar("T")


class RedisAway(Exception):
    """Redis did not answer in time; the caller continues without it."""


class RedisFull(RedisAway):
    """Redis has no memory for what the command would write, and has written nothing."""


class Link:
    """``client`` behind the circuit breaker, which is open (no commands) until the first successful probe after :meth:`start`."""

    def __init__(self, client: Client, telemetry: Telemetry, *, seconds: float, use: str = "limits and results") -> None:
        """``seconds``: default time limit of a command. ``use``: what Redis keeps for the callers, for the log."""
        self.client = client
        self._use = use
        self._telemetry = telemetry
        self._seconds = seconds
        self._is_open = True
        self._opened = asyncio.Event()
        self._late = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_at = 0.0
        self._full_logged = -FULL_LOG_SECONDS
        self._prober: asyncio.Task[None] | None = None
        telemetry.redis_available(use, False)

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: Redis is away and every command fails at once."""
        return self._is_open

    def start(self) -> None:
        """Start probing Redis in the background."""
        self._prober = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """Stop probing and close the connections."""
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        try:
            await asyncio.wait_for(close(self.client), PROBE_SECONDS)
        except Exception as error:  # the program ends in any case
            logger.info("Redis: %s", type(error).__name__)

    async def ask(self, command: Callable[[], Awaitable[T]], *, seconds: float | None = None) -> T:
        """Await ``command()`` within ``seconds``, or within the default limit. Raises :class:`RedisAway`, :class:`RedisFull`."""
        if self._is_open:
            raise RedisAway
        limit = self._seconds if seconds is None else seconds
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                answer = await command()
        except OutOfMemoryError:
            self._refused("full")
            raise RedisFull from None
        except Exception as error:  # any error of the library or the server: no answer depends on Redis
            if _cannot_save(error):
                self._refused("disk")
            else:
                self._failed(error, late=isinstance(error, TimeoutError) and time.monotonic() - began > LATE_FACTOR * limit)
            raise RedisAway from None
        self._late = 0
        return answer

    def _refused(self, kind: str) -> None:
        """Note that Redis refuses to write. ``kind``: a key of :data:`_REMEDIES`."""
        self._telemetry.redis_errors.labels(kind).inc()
        now = time.monotonic()
        if now - self._full_logged >= FULL_LOG_SECONDS:
            self._full_logged = now
            logger.warning("%s", _REMEDIES[kind])

    def _failed(self, error: Exception, *, late: bool) -> None:
        self._telemetry.redis_errors.labels("timeout" if isinstance(error, TimeoutError) else "error").inc()
        self._late += late
        if self._is_open or (late and self._late < LATE_IN_A_ROW):
            return
        self._is_open = True
        self._telemetry.redis_available(self._use, False)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            reason = "this process was too busy to read its answers in time" if late else "no answer in time"
        logger.warning("Redis is unavailable for %s (%s); requests continue without it", self._use, reason)
        if time.monotonic() - self._closed_at > STABLE_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        self._opened.set()

    async def _keep_looking(self) -> None:
        while True:
            while not await self._answers():
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._opened.clear()
            self._late, self._is_open, self._closed_at = 0, False, time.monotonic()
            self._telemetry.redis_available(self._use, True)
            logger.info("Redis is there for %s", self._use)
            await self._opened.wait()
            await asyncio.sleep(self._pause)
            await drop_idle(self.client)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _answers(self) -> bool:
        """Probe while half open: two PINGs, the first of which may have to connect."""
        try:
            for limit in (PROBE_SECONDS, self._seconds):
                async with asyncio.timeout(limit):
                    await self.client.execute_command("PING")
        except Exception as error:
            logger.debug("Redis: %s: %s", type(error).__name__, error)
            return _cannot_save(error)
        return True


def _cannot_save(error: Exception) -> bool:
    """Whether Redis refuses to write because it cannot save. Errors of scripts and pipelines have words before the code."""
    return isinstance(error, ResponseError) and "MISCONF" in str(error)
