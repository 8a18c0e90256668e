"""Where the process is in its life, for the parts that answer differently near its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """Set by the process's signals, read by the application."""

    draining: bool = False
    """Told to end, and serving on so that nobody is turned away: not ready any more, and connections close with their answers."""
    ended: bool = False
    """The grace period is over: requests that are still open have been cancelled, and tell their clients so."""
