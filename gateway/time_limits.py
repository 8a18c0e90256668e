"""Time limits that clients set for their requests. Once a limit has passed, the client no longer waits, so the work is aborted.

``x-yardstick-timeout`` and the field ``timeout`` of a body limit the time until the end of the answer, streams included. OpenAI's
SDKs name the time after which they give up in a header of their own. That time begins anew with every byte, so it only limits the
wait for the beginning of a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from gateway.errors import DeadlineExceeded, InvalidRequest

HEADER = b"x-yardstick-timeout"
SDK_HEADERS = b"x-stainless-read-timeout", b"x-stainless-timeout"
"""Headers of OpenAI's SDKs for Python and for JavaScript, in seconds."""
MAX_SECONDS = 86_400.0
LEAST_SECONDS = 0.001
"""Shortest timer: for a shorter time, uvloop returns a handle that does not know when it runs."""
LATER_SECONDS = 1.0
"""How much later than a client's limit an engine's deadline is, so that the gateway ends the request before the engine fails it."""


class TimeLimits:
    """The limits of one request, counted from its beginning. When one passes, the request's task is cancelled."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._task: asyncio.Task[Any] | None = None
        self._beginning: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._expired: float | None = None

    def read(self, headers: Mapping[bytes, bytes]) -> None:
        """Set the limits that ``headers`` name. The calling task is the one that is cancelled. Raises :class:`InvalidRequest` for a
        wrong value of our own header."""
        self._task = asyncio.current_task()
        _current.set(self)
        for name in SDK_HEADERS:
            if (value := headers.get(name)) and (seconds := _seconds(value)) is not None:
                self._beginning = self._timer(seconds)
                break
        if value := headers.get(HEADER):
            if (seconds := _seconds(value)) is None:
                raise InvalidRequest(f"{HEADER.decode()} must be a number of seconds above 0, and {MAX_SECONDS:g} at most.")
            self.end_within(seconds)

    def end_within(self, seconds: float) -> None:
        """Limit the time until the end of the answer. The last limit that is set holds."""
        if self._end is not None:
            self._end.cancel()
        self._end = self._timer(seconds)

    def response_begins(self, *, stream: bool) -> None:
        """Drop the limits that the response meets: all, unless it is a stream."""
        if self._beginning is not None:
            self._beginning.cancel()
        if self._end is not None and not stream:
            self._end.cancel()

    def close(self) -> None:
        """Drop all limits."""
        self.response_begins(stream=False)

    @property
    def remaining(self) -> float | None:
        """Seconds until the first of the limits passes; None without a limit."""
        ends = [timer.when() for timer in (self._beginning, self._end) if timer is not None and not timer.cancelled()]
        return max(0.0, min(ends) - asyncio.get_running_loop().time()) if ends else None

    @property
    def error(self) -> DeadlineExceeded | None:
        """The error for the client if a limit has passed."""
        if self._expired is None:
            return None
        return DeadlineExceeded(
            f"The request was not answered within {self._expired:g} s, its time limit; ask for less, or allow more."
        )

    def _timer(self, seconds: float) -> asyncio.TimerHandle:
        rest = self._began + seconds - time.perf_counter()
        return asyncio.get_running_loop().call_later(max(LEAST_SECONDS, rest), self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        self._expired = seconds
        if self._task is not None:
            self._task.cancel()


_current: ContextVar[TimeLimits | None] = ContextVar("time_limits", default=None)
"""The limits of the request that the current task works for."""


def engine_deadline(seconds: float) -> float:
    """Seconds after which an engine need not begin a message of the current request: ``seconds``, or less if the client's limit
    passes before."""
    limits = _current.get()
    remaining = None if limits is None else limits.remaining
    return seconds if remaining is None else min(seconds, remaining + LATER_SECONDS)


def _seconds(value: bytes) -> float | None:
    """Return the number in a header; None if it is no valid limit."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_SECONDS else None
