"""One log line for each request that ends without a result, so that an operator finds a client's request by its id.

A line names the request and the reason; it has no token ids, text or error message. A flood of refusals cannot fill a disk: beyond
a burst, :data:`LINES_PER_SECOND` lines are written, and the next one says how many were left out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Literal

from engine import wire
from engine.requests.core import Request

logger = logging.getLogger(__name__)

LINES_PER_SECOND = 10.0
BURST = 200

Ending = Literal["failed", "refused", "displaced", "expired", "aborted", "finished"]

_LEVELS: dict[Ending, int] = {
    "failed": logging.WARNING,
    "refused": logging.WARNING,
    "displaced": logging.WARNING,
    "expired": logging.INFO,
    "aborted": logging.INFO,
    "finished": logging.DEBUG,
}


class RequestLog:
    """Writes the lines of one loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, monotonic."""
        self._clock = clock
        self._allowance = float(BURST)
        self._counted_at = clock()
        self._left_out = 0

    def writes(self, ending: Ending) -> bool:
        """Whether lines of this kind are written at all."""
        return logger.isEnabledFor(_LEVELS[ending])

    def note(self, ending: Ending, request: Request, now: float, **fields: str) -> None:
        """Write a line about a request that was accepted. ``now``: on the clock of :attr:`Request.received`."""
        if not self.writes(ending):
            return
        waited = request.first_computed is None
        queued = now - request.received if waited else request.queue_seconds
        times = {"queue_seconds": round(queued, 3), "computed_tokens": request.computed_tokens}
        self.write(ending, request.caller, request.id, **fields, **times)

    def write(self, ending: Ending, caller: wire.Caller, request_id: str, **fields: str | float) -> None:
        """Write one line: ``request refused request_id="…" id="…" tenant="…" code="overloaded" …``.

        Values are JSON, so ids with quotes or line breaks stay within their field.
        """
        if not self.writes(ending) or not self._allowed():
            return
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        named = {"request_id": caller.request_id, "id": request_id, "tenant": caller.tenant, **fields}
        logger.log(
            _LEVELS[ending], "request %s %s", ending, " ".join(f"{name}={json.dumps(value)}" for name, value in named.items())
        )

    def _allowed(self) -> bool:
        now = self._clock()
        self._allowance = min(BURST, self._allowance + (now - self._counted_at) * LINES_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            self._left_out += 1
            return False
        self._allowance -= 1
        return True
