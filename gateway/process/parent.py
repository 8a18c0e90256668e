"""Ends a process with its parent, on Linux."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

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
