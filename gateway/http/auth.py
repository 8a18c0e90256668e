"""The currently valid keys: reads the key file, or the Secret that it comes from, again, in its own thread, whenever it changes.

======================================  ==================================================================================
state of the file at a check            valid keys
======================================  ==================================================================================
valid                                   those of the file, possibly none
some entries are not valid              those of the other entries; the log and a metric report the problems
missing or empty at two checks in turn  none: deleting the file revokes every key
unreadable or no valid entry            those of the last valid version for ``stale_seconds``; then requests get status 503
======================================  ==================================================================================

With ``api_keys_secret``, the content of a Kubernetes Secret counts in place of the file's while the API tells it, because a kubelet
writes a change into files up to a minute and a half later. Once the API has been away for long, the file counts from its next
change on: until then it may be older than what the API told last. A deleted Secret is a missing file.

A single check without a file is no proof of deletion, because a mounted volume may be replaced in several steps. An unreadable file
says nothing about the keys, so the status is 503 and not 401, after which clients would discard a valid key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from yardstick_llm.gateway.errors import KeyExpired, KeysUnavailable, Unauthorized
from yardstick_llm.gateway.http.body import HttpMiddleware
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.http.context import RequestContext
from yardstick_llm.gateway.keys import SHARED_GROUP, ApiKey, parse_keys
from yardstick_llm.gateway.ops.metrics import KeySample, Telemetry, key_file
from yardstick_llm.gateway.settings import CacheIsolation, SettingsError

if TYPE_CHECKING:
    from yardstick_llm.gateway.process.kubernetes import WatchedSecret

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval between two checks of the file."""
LOOKS_TO_REVOKE = 2
"""Consecutive checks that must find a missing or empty file before all keys are revoked."""
HANG_SECONDS = 10.0
"""A check that takes longer, as on a network file system that hangs, counts as failed."""
MAX_FILE_BYTES = 2 << 20
"""Largest key file, about 20,000 keys. Kubernetes Secrets have at most 1 MiB. Splitting a file of this size into entries holds the
interpreter's lock for 4 ms."""
SHOWN_PROBLEMS = 5
"""Problems of entries that one message quotes."""
RETRY_SECONDS = 5.0
"""Retry-After of requests that are refused because the file cannot be read."""


class Version(NamedTuple):
    """Identity of the file's content; it changes whenever the file, or the link to it, changes."""

    device: int
    inode: int
    mode: int
    """Mode bits, because permissions may make the file unreadable or writable by others."""
    modified: int
    changed: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the version of a file with ``status``."""
        return cls(status.st_dev, status.st_ino, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


class KeyRing:
    """Keeps the valid keys. :meth:`look` runs in one thread at a time, :meth:`find` in the event loop's thread."""

    def __init__(
        self,
        path: Path,
        *,
        stale_seconds: float = 300.0,
        isolation: CacheIsolation = "key",
        secret: WatchedSecret | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file; ``secret`` has the same content, sooner. Raises :class:`SettingsError` for an unusable file."""
        self._path = path
        self._secret = secret
        self._told: bytes | None = None  # what the Secret had when it was read last
        self._stale_seconds = stale_seconds
        self._isolation = isolation
        self._clock = clock
        self._stop = threading.Event()
        self._missed = 0
        self._problem: str | None = None
        self._refusing = False
        try:
            self._version, content = _read(path)
            if not content.strip():
                raise ValueError("the file is empty")
            self._keys, self._problems = self._parsed(content)
        except (OSError, ValueError) as error:
            raise SettingsError(_complaint(path, error)) from None
        self._confirm()
        self._warn_of_writers()
        self._warn_of_problems()
        if not self._keys:
            logger.warning("%s lists no API key: every request to /v1 is refused", path)

    def find(self, key: str) -> ApiKey | None:
        """Return the entry of ``key``, expired or not. Raises :class:`KeysUnavailable`."""
        self.check_usable()
        return self._keys.get(hashlib.sha256(key.encode()).digest())

    def check_usable(self) -> None:
        """Raise :class:`KeysUnavailable` if no key is accepted because the file cannot be read."""
        if self._clock() > self._good_until:
            message = "The server cannot read its API keys, so it accepts none at the moment; your key may be valid. Try again."
            raise KeysUnavailable(message, retry_after=RETRY_SECONDS)

    def sample(self) -> KeySample:
        """Return the state of the key file for the metrics."""
        age = self._clock() - self._confirmed
        stale = self._problem is not None or age > HANG_SECONDS
        return KeySample(len(self._keys), age, stale=stale, problems=len(self._problems))

    def start(self, telemetry: Telemetry) -> None:
        """Check the file once a second until :meth:`stop`. The thread is not joined, because a check may hang."""
        telemetry.watch(lambda: key_file(self.sample()))
        if self._secret is not None:
            self._secret.start()
        threading.Thread(target=self._follow, args=[telemetry], name="api-keys", daemon=True).start()

    def stop(self) -> None:
        """Stop checking the file, and watching the Secret."""
        self._stop.set()
        if self._secret is not None:
            self._secret.stop()

    def look(self, telemetry: Telemetry) -> None:
        """Check the Secret or the file once; read it if it has changed or was unusable before."""
        try:
            found = self._changed()
            if found is None:
                self._confirm()
                return
            version, content = found
            if not content.strip():
                self._miss("is empty", telemetry)
                return
            keys, problems = self._parsed(content)
        except FileNotFoundError:
            self._miss("does not exist any more", telemetry)
        except (OSError, ValueError) as error:
            self._fail(_complaint(self._path, error), telemetry)
        else:
            self._take(version, keys, problems, telemetry)

    def _changed(self) -> tuple[Version | None, bytes] | None:
        """Return version of the file and content, None if they are those known and not empty. Raises :class:`OSError`,
        :class:`ValueError`."""
        told = None if self._secret is None else self._secret.content()
        if told is None:
            unchanged = self._problem is None and Version.of(self._path.stat()) == self._version
            return None if unchanged else _read(self._path)
        version = None
        with suppress(OSError):  # the file does not count now; only its later changes may
            version = Version.of(self._path.stat())
        if self._problem is None and told is self._told and told.strip():
            self._version = version
            return None
        self._told = told
        return version, told

    def _follow(self, telemetry: Telemetry) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.look(telemetry)
            except Exception as error:  # any error must not prevent the next check
                self._fail(f"{self._path}: {type(error).__name__}", telemetry)

    def _parsed(self, content: bytes) -> tuple[dict[bytes, ApiKey], list[str]]:
        """Parse the file into keys by digest, and problems. Raises :class:`ValueError`, also if all entries have problems."""
        keys, problems = parse_keys(content)
        if problems and not keys:
            raise ValueError(_listed(problems))
        if self._isolation == "none":
            keys = [msgspec.structs.replace(key, group=SHARED_GROUP) for key in keys]
        return {bytes.fromhex(key.sha256): key for key in keys}, problems

    def _confirm(self) -> None:
        """Record that the keys are those of the file."""
        self._confirmed = self._clock()
        self._good_until = self._confirmed + self._stale_seconds + HANG_SECONDS
        self._problem, self._missed, self._refusing = None, 0, False

    def _take(self, version: Version | None, keys: dict[bytes, ApiKey], problems: list[str], telemetry: Telemetry) -> None:
        """Use the content of the file. Kubernetes sets a file's permissions once a minute, so an equal content is no news."""
        mode = self._version and self._version.mode
        news = self._problem is not None or (keys, problems) != (self._keys, self._problems)
        emptied = not keys and bool(self._keys)
        self._keys, self._problems, self._version = keys, problems, version
        self._confirm()
        if news or (version and version.mode) != mode:
            self._warn_of_writers()
        if not news:
            return
        if emptied:
            logger.error("%s lists no API key: all keys are revoked", self._path)
        else:
            logger.info("%s: %d API keys", self._path, len(keys))
        self._warn_of_problems()
        telemetry.key_reloads.labels("partial" if problems else "loaded" if keys else "revoked").inc()

    def _warn_of_problems(self) -> None:
        if self._problems:
            logger.error("%s: some entries do not count, all others do: %s", self._path, _listed(self._problems))

    def _warn_of_writers(self) -> None:
        if self._version is not None and self._version.mode & stat.S_IWOTH:
            logger.warning("%s can be written by every user of this machine; remove this permission (chmod o-w)", self._path)

    def _miss(self, reason: str, telemetry: Telemetry) -> None:
        self._missed += 1
        if self._missed < LOOKS_TO_REVOKE:
            return
        if self._missed == LOOKS_TO_REVOKE:
            logger.error("%s %s: all API keys are revoked", self._path, reason)
            telemetry.key_reloads.labels("revoked").inc()
        missed, self._keys, self._problems, self._version, self._told = self._missed, {}, [], None, None
        self._confirm()
        self._missed = missed

    def _fail(self, problem: str, telemetry: Telemetry) -> None:
        """Keep the last valid version until it is too old."""
        self._missed = 0
        if problem != self._problem:
            self._problem = problem
            self._good_until = self._confirmed + self._stale_seconds
            telemetry.key_reloads.labels("broken").inc()
            logger.error("%s; the %d keys read before stay valid for %g s", problem, len(self._keys), self._stale_seconds)
        if not self._refusing and self._clock() > self._good_until:
            self._refusing = True
            logger.error("%s; requests are answered 503 from now on", problem)


def _read(path: Path) -> tuple[Version | None, bytes]:
    """Return the content, and its version unless the file changed meanwhile. Raises :class:`OSError`, :class:`ValueError`."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as stream:
        before = Version.of(os.fstat(stream.fileno()))
        content = stream.read(MAX_FILE_BYTES + 1)
        after = Version.of(os.fstat(stream.fileno()))
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
    return before if before == after else None, content


def _listed(problems: list[str]) -> str:
    more = len(problems) - SHOWN_PROBLEMS
    return "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _complaint(path: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f'{path}: not a file of API keys ({reason}); write {{"keys": [{{"name": …, "sha256": …}}]}}'


MAX_HEADER_BYTES = 1024
"""Longest ``Authorization`` header that is accepted; a key of ``yardstick keys new`` gives a header of 53 bytes."""


class RequireKey(HttpMiddleware):
    """Refuses requests without a valid key, and stores the key in the request's context.

    A guard of the framework would need three times the CPU time.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass a request with a valid key on. Raises :class:`Unauthorized`, :class:`gateway.errors.KeysUnavailable`."""
        RequestContext.in_scope(scope).key = key_of(self._ring, scope)
        await next_app(scope, receive, send)


def key_of(ring: KeyRing, scope: Scope) -> ApiKey:
    """Return the API key of a request. Raises :class:`Unauthorized`, :class:`gateway.errors.KeysUnavailable`."""
    given = Incoming.of(scope).headers.get(b"authorization", b"")
    if len(given) > MAX_HEADER_BYTES:
        raise Unauthorized(f"The `Authorization` header is longer than {MAX_HEADER_BYTES} bytes; no API key is that long.")
    scheme, _space, secret = given.decode("latin-1").partition(" ")
    key = ring.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise Unauthorized("No valid API key was sent; send one as `Authorization: Bearer KEY`.")
    if key.expires is not None and key.expires_at <= time.time():
        raise KeyExpired(f"This API key expired on {key.expires.isoformat()}; ask for a new one.")
    return key
