"""Bounds on time, and on room that tenants share."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

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


ALPHA = 4.0
"""A single busy tenant may use four fifths of the room; each of n busy tenants gets 4/(1 + 4n), and 1/(1 + 4n) stays free."""
MAX_WEIGHT = 4.0
"""Largest effective weight. It allows 16/17 of the room to a single busy tenant, so that other tenants always find some room."""


class Tenant(NamedTuple):
    """Whom room is given to: a key, or on a server without keys everyone together."""

    id: str | None = None
    weight: float = 1.0


class FairRoom:
    """Room for ``capacity`` units, of which a tenant may hold at most ``alpha`` times what is still free.

    The fewer tenants are busy, the more each may hold, and a new tenant finds room without evicting another.
    Source: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
    Transactions on Networking 6 (2), 1998.
    """

    def __init__(self, capacity: int, alpha: float = ALPHA) -> None:
        self.capacity = capacity
        self.used = 0
        self._alpha = alpha
        self._held: dict[str, int] = {}

    def most(self, tenant: str | None, weight: float = 1.0) -> int:
        """Return the most units that one :meth:`take` can give ``tenant``: its units when no tenant holds any."""
        share = 1.0 if tenant is None else self._alpha * min(weight, MAX_WEIGHT)
        return int(min(share, 1.0) * self.capacity)

    def take(self, tenant: str | None, amount: int = 1, weight: float = 1.0) -> bool:
        """Take ``amount`` units for ``tenant`` and return True, or take nothing and return False. ``weight`` scales the threshold,
        up to ``MAX_WEIGHT``. Tenant None (a server without keys) may use all room."""
        free = self.capacity - self.used
        if amount > free:
            return False
        if tenant is not None:
            held = self._held.get(tenant, 0) + amount
            if held > self._alpha * min(weight, MAX_WEIGHT) * free:
                return False
            self._held[tenant] = held
        self.used += amount
        return True

    def give(self, tenant: str | None, amount: int = 1) -> None:
        """Give back ``amount`` units that ``tenant`` took."""
        self.used -= amount
        if tenant is not None:
            held = self._held[tenant] - amount
            assert held >= 0, "a tenant gives back no more than it holds"
            if held:
                self._held[tenant] = held
            else:
                del self._held[tenant]  # keys change over time, so empty entries are removed
