"""Shutdown state of the process, for the parts that behave differently near its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """Shutdown state. Signal handlers set it, and the application reads it."""

    draining: bool = False
    """Draining: not ready, still serving requests; connections close after their responses."""
    ended: bool = False
    """The grace period is over: open requests have been cancelled and send an error to their clients."""
