"""Checks the bearer token of each request, so that only gateways can use the engine."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_Version = tuple[int, int, int]
"""Inode, time of change in nanoseconds, size: a mounted Secret is replaced, not written."""


class BearerTokenError(ValueError):
    """The file has no token; the message is one line."""


class BearerTokens:
    """The tokens in a file, one a line, so that an old one can stay beside the new one while gateways change over.

    The file is read again when it has changed; while it cannot be read, the last good tokens stay.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`BearerTokenError`."""
        self._path = path
        self._seen: _Version | None = None
        self._tokens: list[bytes] = []
        self._refresh()
        if not self._tokens:
            raise BearerTokenError(f"{path} has no token in it or cannot be read; write one into it, or leave out --token-file.")

    def opens(self, authorization: str) -> bool:
        """Whether the header's value is ``Bearer`` and a token. Takes as long for a wrong one as for a right one."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(found)

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen:
                return
            tokens = self._path.read_bytes().split()
        except OSError as error:
            if self._seen is not None:
                logger.warning("the token file cannot be read (%s); the last tokens stay", error.strerror)
                self._seen = None
            return
        self._seen = version
        if tokens:
            self._tokens = tokens
        else:
            logger.warning("the token file is empty; the last tokens stay")
