"""Errors of a connection to an engine."""

from __future__ import annotations

from gateway.errors import EngineLost, EngineSilent, NotReady


def unreachable() -> NotReady:
    """The error if no connection can be made."""
    return NotReady("The model's engine cannot be reached; try again soon.", retry_after=1, retryable=True)


def silent() -> EngineSilent:
    """The error if nothing was received for too long."""
    return EngineSilent("The engine was silent for too long; try again, or ask for less at once.")


def lost() -> EngineLost:
    """The error if the connection broke."""
    return EngineLost("The connection to the engine broke; try again.", retryable=True)


def unreadable() -> EngineLost:
    """The error for an answer that is not valid."""
    return EngineLost("The engine's answer cannot be read; its version may not match the gateway's.")
