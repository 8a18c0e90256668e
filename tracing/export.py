"""A bounded queue of spans, and the thread that sends them.

The threads that record spans only append to the queue. While the collector is away or slow, spans are dropped and counted: no
request waits for it, and memory stays bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain

from yardstick_llm.tracing.spans import Span

logger = logging.getLogger(__name__)

MAX_SPANS = 4096
"""Most spans in the queue, about a kilobyte each."""
BATCH_SPANS = 128
"""Spans of one message to the collector. Encoding them takes the interpreter 4 ms, in which the event loop may have to wait."""
DELAY_SECONDS = 1.0
"""Longest time that a span waits for others before it is sent."""
CLOSE_SECONDS = 2.0
"""Longest wait for the last spans to be sent at the end of the process."""


class TracingError(ValueError):
    """Traces cannot be exported as the settings ask. The message is one line that names the remedy."""


Send = Callable[[list[Span]], bool]
"""Sends spans, which may take long, and returns whether they arrived."""
Shutdown = Callable[[], None]
"""Ends the pauses between the attempts to send, and later attempts."""


class Exporter:
    """Owns the queue and the thread, which :meth:`start` starts and :meth:`close` ends."""

    def __init__(
        self,
        send: Send,
        shutdown: Shutdown,
        *,
        max_spans: int = MAX_SPANS,
        batch_spans: int = BATCH_SPANS,
        delay_seconds: float = DELAY_SECONDS,
    ) -> None:
        self._send = send
        self._shutdown = shutdown
        self._max_spans = max_spans
        self._batch_spans = min(batch_spans, max_spans)
        self._delay_seconds = delay_seconds
        self._queue: deque[list[Span]] = deque()
        self._queued = 0
        """Spans in the queue and in the batch that is being sent."""
        self._dropped = 0
        self._lock = threading.Lock()
        self._full = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    @property
    def dropped(self) -> int:
        """Number of spans that did not reach the collector, because the queue was full or a request to it failed."""
        return self._dropped

    def put(self, spans: list[Span]) -> None:
        """Queue the spans of one request, or drop them. Never blocks."""
        with self._lock:
            if self._queued + len(spans) > self._max_spans or self._stop.is_set():
                self._dropped += len(spans)
                return
            self._queued += len(spans)
            self._queue.append(spans)
        if self._queued >= self._batch_spans and not self._full.is_set():
            self._full.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is queued, for at most ``seconds``, and end the thread. What is not sent by then is dropped."""
        self._stop.set()
        self._full.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._shutdown()
        with self._lock:
            self._dropped += self._queued
            self._queued = 0
            self._queue.clear()
        if self._dropped:
            logger.warning("%d spans did not reach the collector", self._dropped)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._full.wait(self._delay_seconds)
            self._full.clear()
            while batch := self._take():
                self._deliver(batch)

    def _take(self) -> list[Span]:
        """Return the next batch, of whole requests; empty if there is none."""
        taken: list[list[Span]] = []
        with self._lock:
            size = 0
            while self._queue and (not taken or size + len(self._queue[0]) <= self._batch_spans):
                taken.append(self._queue.popleft())
                size += len(taken[-1])
        return list(chain.from_iterable(taken))

    def _deliver(self, batch: list[Span]) -> None:
        try:
            arrived = self._send(batch)
        except Exception:
            logger.exception("spans could not be sent")
            arrived = False
        with self._lock:
            if self._queued:  # else :meth:`close` has counted them
                self._queued -= len(batch)
                self._dropped += 0 if arrived else len(batch)
