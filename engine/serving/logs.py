"""Logging of the loop's process. The loop never waits for whoever reads its standard error: a reader that stops would stop the
engine as soon as the pipe is full. Lines go through a queue to a thread of their own; where the queue is full, they are dropped.
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


class DroppingHandler(QueueHandler):
    """Queues records, and counts those for which there is no room."""

    dropped = 0

    def flush(self) -> None:
        """Wait until all queued lines are written, :data:`FLUSH_SECONDS` at most."""
        limit = time.monotonic() + FLUSH_SECONDS
        assert isinstance(self.queue, queue.Queue)
        while self.queue.unfinished_tasks and time.monotonic() < limit:
            time.sleep(0.01)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


def start(stream: TextIO = sys.stderr) -> DroppingHandler:
    """Write the lines of all loggers to ``stream``, from a daemon thread. Returns the handler of the root logger."""
    writer = logging.StreamHandler(stream)
    writer.setFormatter(logging.Formatter(FORMAT))
    handler = DroppingHandler(queue.Queue[logging.LogRecord](MAX_QUEUED))
    QueueListener(handler.queue, writer).start()
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler
