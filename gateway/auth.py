"""API keys: a file of their hashes, read again when it changes, and the middleware that asks for one.

The file is JSON; everything but ``name`` and ``sha256`` may be left out::

    {"keys": [{"name": "ci", "sha256": "<hexadecimal SHA-256 of the key>", "models": ["ranker"], "requests_per_minute": 600,
               "tokens_per_minute": 1000000, "items_per_minute": 20000, "concurrency": 8, "expires": "2027-01-31T00:00:00Z"}]}

Keys are random and long, so a plain hash is enough; ``printf %s "$KEY" | sha256sum`` makes one. A key is found by its digest:
what the time of a look-up tells of digests brings nobody nearer to a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import msgspec
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.errors import KeyExpired, Unauthorized
from gateway.exchange import Exchange
from gateway.limits.base import Limits
from gateway.settings import SettingsError
from gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the file."""

Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One key."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """For people: who uses it."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    """Hexadecimal SHA-256 of the key."""
    models: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    """The only models that it may use."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Of prompts and completions together."""
    items_per_minute: Limit | None = None
    """Scored items."""
    concurrency: Limit | None = None
    """Requests at a time."""
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """When it ends to be good."""

    @cached_property
    def id(self) -> str:
        """Its name in Redis."""
        return self.sha256[:16].lower()

    @cached_property
    def limits(self) -> Limits:
        """All that is counted."""
        return Limits((self.requests_per_minute, self.tokens_per_minute, self.items_per_minute), self.concurrency)

    @cached_property
    def expires_at(self) -> float:
        """Seconds since 1970; infinite where it never does."""
        return float("inf") if self.expires is None else self.expires.timestamp()


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    keys: Annotated[list[ApiKey], msgspec.Meta(min_length=1)]


class KeyRing:
    """The keys that open ``/v1``: those of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`SettingsError`."""
        self._path = path
        self._state = _state(path)
        self._keys = _read(path)

    def find(self, key: str) -> ApiKey | None:
        """The entry of ``key``, expired or not."""
        return self._keys.get(hashlib.sha256(key.encode()).digest())

    async def follow(self, telemetry: Telemetry) -> None:
        """For ever: read the file again whenever it is another, or its link points to another, as when Kubernetes mounts a changed
        Secret. A file that cannot be used is reported once, and the keys stay as they were."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            state = await asyncio.to_thread(_state, self._path)
            if state == self._state:
                continue
            self._state = state
            try:
                self._keys = await asyncio.to_thread(_read, self._path)
            except SettingsError as error:
                telemetry.keys_reloaded("broken")
                logger.error("%s; the keys stay as they were", error)
            else:
                telemetry.keys_reloaded("loaded")
                logger.info("%s: %d keys", self._path, len(self._keys))


class RequireKey(ASGIMiddleware):
    """Refuses requests without a good key of the ring, and leaves the key in the exchange. (As a guard of the framework's it
    would cost three times as much.)"""

    scopes = (ScopeType.HTTP,)

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def __deepcopy__(self, _: object) -> Self:
        """The framework copies routers with all that is in them, but there is one ring."""
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass on a request whose key is good. Raises :class:`Unauthorized`."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        scheme, _space, secret = given.partition(" ")
        key = self._ring.find(secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise Unauthorized("No valid API key was sent; send one as `Authorization: Bearer KEY`.")
        if key.expires is not None and key.expires_at <= time.time():
            raise KeyExpired(f"This API key expired on {key.expires.isoformat()}; ask for a new one.")
        Exchange.in_scope(scope).key = key
        await next_app(scope, receive, send)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Differs where the file does; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> dict[bytes, ApiKey]:
    """By digest. Raises :class:`SettingsError`."""
    try:
        return _by_digest(msgspec.json.decode(path.read_bytes(), type=KeyFile).keys)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingsError(f'{path}: not a file of API keys ({reason}); write {{"keys": [{{"name": …, "sha256": …}}]}}') from None


def _by_digest(keys: Iterable[ApiKey]) -> dict[bytes, ApiKey]:
    return {bytes.fromhex(key.sha256): key for key in keys}
