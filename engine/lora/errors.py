"""The error of an adapter that cannot be loaded or unloaded."""

from __future__ import annotations

from engine import wire


class AdapterError(Exception):
    """An adapter is absent, unsupported or damaged, or there is no room for it.

    The message is one or two plain sentences for the person who loads it: which key or tensor is wrong and what to do about it. It
    names no path.
    """

    def __init__(self, message: str, code: wire.ErrorCode = "invalid", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code: wire.ErrorCode = code
        self.retryable = retryable
