"""The access log: one line for each request, at the end of its response.

A line records the key, model and endpoint of a request, its costs and its outcome. Its only text from the request is the request
id, which is sanitised: it has no path, prompt or other header.

The threads that log only append to a bounded queue. If the reader of the pipe does not read, or the disk is full, lines are dropped
and counted: no thread that logs waits, and memory stays bounded.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Literal, Self

import msgspec

MAX_LINES = 8192
"""Most lines in the queue, some 700 bytes each."""
BATCH_LINES = 128
"""Lines that are encoded without letting the event loop run; takes less than 1 ms."""
BATCH_SECONDS = 0.1
"""Delay between the first line of a batch and its write. One wake-up for each line would cost more than the line."""
CLOSE_SECONDS = 2.0
"""Longest wait for the last lines to be written at the end of the process."""
_WRITE_BYTES = 1 << 16
_RETRY_SECONDS = 0.1

Line = bytes | Callable[[], bytes]
"""A line with its newline, or a function that returns one and is called in the writer's thread."""


class LineWriter:
    """A context manager that owns the thread. At its end it writes the queued lines, within ``CLOSE_SECONDS``."""

    def __init__(self, file: int) -> None:
        """``file``: the file descriptor, which stays open."""
        self._file = file
        self._queue: deque[Line] = deque()
        self._lines = threading.Event()
        self._stop = threading.Event()
        self._torn = False  # whether the last write ended within a line
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._overflowed = 0  # counted by the threads that log
        self._failed = 0  # counted by the writer's thread

    @property
    def dropped(self) -> int:
        """Number of lines that were not written, because the queue was full or a write failed."""
        return self._overflowed + self._failed

    def put(self, line: Line) -> None:
        """Queue ``line``, or drop it. Never blocks."""
        if len(self._queue) >= MAX_LINES:
            self._overflowed += 1
            return
        self._queue.append(line)
        if not self._lines.is_set():
            self._lines.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._lines.set()
        self._thread.join(CLOSE_SECONDS)
        self._overflowed += len(self._queue)
        self._queue.clear()

    def _run(self) -> None:
        while True:
            self._lines.clear()
            if not self._queue and not self._stop.is_set():
                self._lines.wait()
            if not self._stop.is_set():
                self._stop.wait(BATCH_SECONDS)
            elif not self._queue:
                return
            while self._queue:
                self._write(b"".join(self._take()))

    def _take(self) -> list[bytes]:
        """Return the next batch of lines."""
        lines: list[bytes] = []
        with suppress(IndexError):  # the queue is empty, or was cleared at the end
            while len(lines) < BATCH_LINES:
                line = self._queue.popleft()
                lines.append(line if isinstance(line, bytes) else line())
        return lines

    def _write(self, lines: bytes) -> None:
        """Write ``lines``; blocks while the reader of the pipe does not read. A failure drops the rest of ``lines``."""
        rest = memoryview(b"\n" + lines if self._torn else lines)
        self._torn = False
        while rest:
            try:
                written = os.write(self._file, rest[:_WRITE_BYTES])
            except BlockingIOError:  # another process that shares the pipe made it non-blocking
                select.select([], [self._file], [], _RETRY_SECONDS)
            except OSError:
                self._failed += bytes(rest).count(b"\n")
                self._torn = len(rest) < len(lines)
                return
            else:
                rest = rest[written:]


class LogHandler(logging.Handler):
    """Passes the records of :mod:`logging` to a :class:`LineWriter`."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Format the record and queue it."""
        self._writer.put(f"{self.format(record)}\n".encode(errors="backslashreplace"))


PROBES = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""Endpoints that are polled, by orchestrators and monitoring."""
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Account:
    """Costs of a request, for the access log. Routes fill in the fields as they become known."""

    model: str | None = None
    adapter: str | None = None
    """Adapter of the model, as engines call it; None without one."""
    items: int = 0
    cache_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    """Longest time that a part of the request waited in an engine's queue."""


Outcome = Literal["ok", "client_gone", "error", "shutdown"]


@dataclass(slots=True)
class RequestRecord:
    """The course of a request up to now."""

    id: bytes
    began: float = field(default_factory=time.perf_counter)
    status: int = 499
    """Status of the response; 499 (client left) until it begins."""
    first_byte: float | None = None
    account: Account = field(default_factory=Account)
    outcome: Outcome = "ok"
    """Outcome of a stream after its beginning. For other responses the status tells this, unless the outcome is "shutdown"."""
    error: str | None = None
    """Code of the error in the response, or its type if it has no code."""

    @property
    def key_name(self) -> str | None:
        """Name of the API key; None without one."""
        return None

    @property
    def broke(self) -> bool:
        """Whether a stream ended with an error after a successful status."""
        return self.status < 400 and self.outcome in ("error", "shutdown")


class AccessLine(msgspec.Struct, gc=False):
    """The log entry of one request. A line is one JSON object."""

    time: datetime
    """End of the response."""
    id: str
    """The response's ``x-request-id``."""
    key: str | None
    """Name of the API key."""
    model: str | None
    """Null if the request named no existing model."""
    endpoint: str
    """The route, such as ``/v1/models/{model}``; ``none`` for other paths."""
    status: int
    """499 if the client left before the response began."""
    outcome: str
    """``ok``, ``refused`` (status 4xx), ``error`` (5xx), ``broken_stream`` (an error after status 200), ``client_gone``,
    ``shutdown``."""
    error: str | None
    """The error's code, or its type if it has no code."""
    prompt_tokens: int
    """Tokens of all prompts; for scoring, query and item of every item."""
    cached_tokens: int
    """Prompt tokens that were not computed."""
    completion_tokens: int
    """Generated tokens, including those of a stream that broke or that the client left."""
    items: int
    """Items that were scored, or texts whose length was estimated."""
    cache_hits: int
    """Items whose result was in the cache."""
    queue_seconds: float
    """Longest wait of a part of the request in an engine's queue."""
    first_byte_seconds: float | None
    """From the request to the start of the response; null if none began."""
    total_seconds: float
    """From the request to the end of the response."""


class AccessLog:
    """Creates the lines and queues them."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def ended(self, record: RequestRecord, endpoint: str, seconds: float) -> None:
        """Log a request that ended after ``seconds``, unless it was a probe. Called on the event loop; takes 2 µs."""
        if endpoint in PROBES:
            return
        account = record.account
        line = AccessLine(
            datetime.fromtimestamp(time.time(), UTC),
            record.id.decode(),
            record.key_name,
            account.model if account.adapter is None else f"{account.model}:{account.adapter}",
            endpoint,
            record.status,
            outcome_of(record),
            record.error,
            account.prompt_tokens,
            account.cached_tokens,
            account.completion_tokens,
            account.items,
            account.cache_hits,
            account.queue_seconds,
            None if record.first_byte is None else record.first_byte - record.began,
            seconds,
        )
        self._writer.put(partial(_encoded, line))

    def refused(self, id: str, status: int, error: str, seconds: float) -> None:
        """Log a request that was refused with ``status`` before it was complete, ``seconds`` after its connection began to wait
        for it."""
        self.ended(RequestRecord(id.encode(), status=status, error=error), "none", seconds)


def outcome_of(record: RequestRecord) -> str:
    """Return the outcome of a request, as documented for ``AccessLine.outcome``."""
    if record.outcome == "error" and record.status < 400:
        return "broken_stream"
    if record.outcome != "ok":
        return record.outcome
    if record.status < 400:
        return "ok"
    if record.status == 499:
        return "client_gone"
    return "refused" if record.status < 500 else "error"


def _encoded(line: AccessLine) -> bytes:
    """Return the line with times rounded to microseconds."""
    line.queue_seconds = round(line.queue_seconds, 6)
    line.total_seconds = round(line.total_seconds, 6)
    if line.first_byte_seconds is not None:
        line.first_byte_seconds = round(line.first_byte_seconds, 6)
    return _encoder.encode(line) + b"\n"
