"""A time limit for untrusted code, in a process that may be killed by it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import NoReturn

HARD_FACTOR = 1.5
"""Hard limit on CPU time relative to the time limit. The kernel kills the process then, because code that does not return to the
interpreter receives no exception."""


class TimeIsUp(BaseException):
    """The code took too long. This is a BaseException, so that ``except Exception`` does not catch it."""


_keeps_alarm = False


def keep_alarm() -> None:
    """Handle SIGALRM from here on, in a process that uses it for :func:`at_most` only. Setting the handler for each block takes as
    long as a short template."""
    global _keeps_alarm
    signal.signal(signal.SIGALRM, _raise)
    _keeps_alarm = True


class at_most:
    """A context manager that raises :class:`TimeIsUp` from its block after ``seconds``. Works only in the main thread of a process,
    and not inside another one. It is no generator, because every chat enters it.

    If the block uses CPU time of :data:`HARD_FACTOR` times ``seconds``, the kernel ends the process with SIGVTALRM.
    """

    __slots__ = ("_previous", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._previous = None if _keeps_alarm else signal.signal(signal.SIGALRM, _raise)
        signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds * HARD_FACTOR)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if not _keeps_alarm:
            signal.signal(signal.SIGALRM, self._previous)


def _raise(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise TimeIsUp
