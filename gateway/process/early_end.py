"""Handles signals until a server sets its own handlers."""

from __future__ import annotations

import signal
import sys


def end_quietly() -> None:
    """Let SIGINT and SIGTERM end this process with status 0, as they do later, until the server sets its own handlers.

    By default, Python shows a traceback of its imports at SIGINT; and SIGTERM is lost if this is the first process of a container.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
