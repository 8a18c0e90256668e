"""Writes lines to a file descriptor from a thread.

The threads that log only append to a bounded queue. If the reader of the pipe does not read, or the disk is full, lines are dropped
and counted: no thread that logs waits, and memory stays bounded.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

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
