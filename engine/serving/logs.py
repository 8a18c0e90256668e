"""Logging of the loop's process. The loop never waits for whoever reads its standard error: a reader that stops would stop the
engine as soon as the pipe is full. Lines go through a queue to a thread of their own; where the queue is full, they are dropped.
``logging.shutdown``, which Python calls at its exit, waits a second for the thread.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_QUEUED = 1000
"""Lines that wait to be written."""
FLUSH_SECONDS = 1.0
"""Longest wait for the last lines when the process ends."""


class DroppingHandler(QueueHandler):
    """Queues records, and counts those for which there is no room."""

    def __init__(self) -> None:
        self.lines = queue.Queue[logging.LogRecord](MAX_QUEUED)
        self.dropped = 0
        super().__init__(self.lines)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until every queued line is written, for ``FLUSH_SECONDS`` at most."""
        ends = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < ends:
            time.sleep(0.005)


def start(stream: TextIO = sys.stderr) -> DroppingHandler:
    """Write the lines of all loggers to ``stream``, from a daemon thread. Returns the handler of the root logger."""
    writer = logging.StreamHandler(stream)
    writer.setFormatter(logging.Formatter(FORMAT))
    handler = DroppingHandler()
    QueueListener(handler.lines, writer).start()
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler
