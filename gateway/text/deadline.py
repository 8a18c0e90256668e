"""A time limit for foreign code, in a process that may die of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

HARD_FACTOR = 1.5
"""CPU time after which the process is killed, relative to the limit: code that does not return to the interpreter sees no
exception."""


class TimeIsUp(BaseException):
    """The code took too long. No ``except Exception`` catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeIsUp` from the block after ``seconds``. Only in the main thread of a process.

    The kernel ends the process with SIGVTALRM where the block then goes on for half as long again.
    """
    previous = signal.signal(signal.SIGALRM, _raise)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds * HARD_FACTOR)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _raise(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise TimeIsUp
