"""Handles signals until a server sets its own handlers."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ends, and of a server that it ends before it serves."""


def end_quietly() -> None:
    """Let SIGTERM end this process with status 0, as it does later, and SIGINT with :data:`INTERRUPTED`, until the server sets its
    own handlers.

    By default, Python shows a traceback of its imports at SIGINT; and SIGTERM is lost if this is the first process of a container.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
