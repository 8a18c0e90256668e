"""API keys: a file of their hashes, and the guard that asks for one.

The file is JSON: ``{"keys": [{"name": "ci", "sha256": "<hexadecimal SHA-256 of the key>"}]}``. Keys are random and long, so a plain
hash is enough; ``printf %s "$KEY" | sha256sum`` makes one.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Annotated, Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from gateway.errors import Unauthorized
from gateway.settings import SettingsError


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """For people: who uses it."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    """Hexadecimal SHA-256 of the key."""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    keys: Annotated[list[ApiKey], msgspec.Meta(min_length=1)]


class KeyRing:
    """The keys that open ``/v1``."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self._digests = [bytes.fromhex(key.sha256) for key in keys]

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Raises :class:`SettingsError`."""
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=KeyFile).keys)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SettingsError(
                f'{path}: not a file of API keys ({reason}); write {{"keys": [{{"name": …, "sha256": …}}]}}'
            ) from None

    def opens(self, key: str) -> bool:
        """Whether ``key`` is on the ring. Takes as long for a wrong key as for any right one."""
        digest = hashlib.sha256(key.encode()).digest()
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419 - all are compared

    @property
    def guard(self) -> Guard:
        """Refuses requests without a key of the ring."""

        def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
            scheme, _space, key = connection.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self.opens(key.strip()):
                raise Unauthorized("No valid API key was sent; send one as `Authorization: Bearer KEY`.")

        return require_key
