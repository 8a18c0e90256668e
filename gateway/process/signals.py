"""Signals: the end of a process and of its children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ends, and of a server that it ends before it serves."""


def end_quietly() -> None:
    """Let SIGTERM end this process with status 0, as it does later, and SIGINT with :data:`INTERRUPTED`, until the server sets its
    own handlers.

    By default, Python shows a traceback of its imports at SIGINT; and SIGTERM is lost if this is the first process of a container.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))


_PR_SET_PDEATHSIG = 1


def ending_with(parent: int, signal_number: int, status: int) -> Callable[[], None] | None:
    """Return a function that a new process calls first: it asks the kernel for a signal when ``parent`` ends, and ends the process
    with ``status`` if ``parent`` has ended already. None if not on Linux. It imports nothing, so it may run behind a fork."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(status)

    return arm


@dataclass(slots=True)
class Lifecycle:
    """Shutdown state. Signal handlers set it, and the application reads it."""

    draining: bool = False
    """Draining: not ready, still serving requests; connections close after their responses."""
    ended: bool = False
    """The grace period is over: open requests have been cancelled and send an error to their clients."""
