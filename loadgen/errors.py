"""The error that ends a command early."""

from __future__ import annotations


class LoadError(Exception):
    """The command cannot continue. The message is one line for the user: the problem and the remedy."""


def reason_of(error: OSError) -> str:
    """Return the operating system's words for ``error``."""
    return (error.strerror or str(error)).lower()
