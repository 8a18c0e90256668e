"""Redis clients, and the link through which a gateway uses one: time limits, a circuit breaker, and scripts.

The first failure opens the breaker; a background task closes it again. While it is open, commands fail at once: when Redis goes
away, a request loses at most one time limit, and later requests lose nothing. Opening at the first failure is acceptable because
the first probe follows within a quarter of a second. Callers that cannot answer without Redis give a longer limit of their own, and
ask all the same.

Before a probe, idle connections are closed: after a failover they may lead to the old primary, which answers and takes no writes,
while its address leads to the new one.

A Redis without memory refuses what would take more, and answers everything else, so that is no reason to open the breaker. Nor is
one that cannot save to its disk: it refuses all that would change something, and PING (``stop-writes-on-bgsave-error``, AOF). Nor
is a command that its user may not give.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.credentials import CredentialProvider
from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ResponseError

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.settings import Settings

logger = logging.getLogger(__name__)

Client = Redis | RedisCluster

MAX_CONNECTIONS = 64
"""Most connections to each node. At 0.1 ms per command this is far more than one gateway can use. A command that finds no free
connection waits within its time limit."""
CONNECT_SECONDS = 2.0
"""Connect timeout. It matters to background work only; the limit of a request is shorter."""
DEFAULT_PORT = 6379
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0
"""Pauses between two probes while Redis is away; they double from the first to the longest."""
STABLE_SECONDS = 30.0
"""If Redis fails again within this time, the pauses continue to double: one of several nodes may be down, which a probe does not
detect."""
PROBE_SECONDS = 2.0
"""Time limit of the first PING on a new connection. A second PING must be answered within the limit of a request."""
LATE_FACTOR = 1.5
"""A timeout that fires later than this multiple of its limit means that this process was busy; Redis may have answered in time."""
LATE_IN_A_ROW = 3
REFUSED_LOG_SECONDS = 60.0
"""Shortest time between two lines of the log that tell what Redis refuses."""
_REMEDIES = {
    "full": "Redis has no memory left: raise its maxmemory, or delete catalogues; it is read and not written",
    "disk": "Redis cannot save to its disk: make room there, and read its log; it is read and not written",
    "rights": "Redis does not let its user give a command; docs/caching.md lists those that a gateway needs, by what they are for",
}
"""By kind of error."""

T = TypeVar("T")


class RedisAway(Exception):
    """Redis did not answer in time; the caller continues without it."""


class RedisFull(RedisAway):
    """Redis has no memory for what the command would write, and has written nothing."""


class Script:
    """A Lua script, which Redis runs atomically. It is called by its digest; its source is sent if Redis does not have it."""

    def __init__(self, source: str) -> None:
        self._source = inspect.cleandoc(source)
        self._digest = hashlib.sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Client, keys: Sequence[bytes | str], arguments: Sequence[Any]) -> Any:
        """Run the script. On a cluster, all ``keys`` must belong to one slot."""
        try:
            return await client.execute_command("EVALSHA", self._digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await client.execute_command("EVAL", self._source, len(keys), *keys, *arguments)


class Link:
    """``client`` behind the circuit breaker, which is open (no commands) until the first successful probe after :meth:`start`."""

    def __init__(self, client: Client, telemetry: Telemetry, *, seconds: float) -> None:
        """``seconds``: time limit of a command."""
        self.client = client
        self._telemetry = telemetry
        self._seconds = seconds
        self._is_open = True
        self._opened = asyncio.Event()
        self._late = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_at = 0.0
        self._refusal_logged = -REFUSED_LOG_SECONDS
        self._prober: asyncio.Task[None] | None = None
        telemetry.redis_up.set(0)

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: Redis is away and commands without a limit of their own fail at once."""
        return self._is_open

    def start(self) -> None:
        """Start probing Redis in the background."""
        self._prober = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """Stop probing and close the connections."""
        await end_tasks(self._prober)
        try:
            await asyncio.wait_for(_close(self.client), PROBE_SECONDS)
        except Exception as error:  # the program ends in any case
            logger.info("Redis: %s", type(error).__name__)

    async def ask(self, command: Callable[[], Awaitable[T]], *, seconds: float | None = None) -> T:
        """Await ``command()``. ``seconds``: a limit of the caller's own, with which Redis is asked also while the breaker is open.
        Raises :class:`RedisAway`, :class:`RedisFull`."""
        if self._is_open and seconds is None:
            raise RedisAway
        limit = self._seconds if seconds is None else seconds
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                answer = await command()
        except OutOfMemoryError:
            self._refused("full")
            raise RedisFull from None
        except Exception as error:  # any error of the library or the server: no answer depends on Redis
            if _cannot_save(error):
                self._refused("disk")
            elif _is_forbidden(error):
                self._refused("rights")
            else:
                self._failed(error, late=isinstance(error, TimeoutError) and time.monotonic() - began > LATE_FACTOR * limit)
            raise RedisAway from None
        self._late = 0
        return answer

    def _refused(self, kind: str) -> None:
        """Note that Redis refuses a command. ``kind``: a key of :data:`_REMEDIES`."""
        self._telemetry.redis_errors.labels(kind).inc()
        now = time.monotonic()
        if now - self._refusal_logged >= REFUSED_LOG_SECONDS:
            self._refusal_logged = now
            logger.warning("%s", _REMEDIES[kind])

    def _failed(self, error: Exception, *, late: bool) -> None:
        self._telemetry.redis_errors.labels("timeout" if isinstance(error, TimeoutError) else "error").inc()
        self._late += late
        if self._is_open or (late and self._late < LATE_IN_A_ROW):
            return
        self._is_open = True
        self._telemetry.redis_up.set(0)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            reason = "this process was too busy to read its answers in time" if late else "no answer in time"
        logger.warning("Redis is unavailable (%s); requests continue without it", reason)
        if time.monotonic() - self._closed_at > STABLE_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        self._opened.set()

    async def _keep_looking(self) -> None:
        while True:
            while not await self._answers():
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._opened.clear()
            self._late, self._is_open, self._closed_at = 0, False, time.monotonic()
            self._telemetry.redis_up.set(1)
            logger.info("Redis is there")
            await self._opened.wait()
            await asyncio.sleep(self._pause)
            if not isinstance(self.client, RedisCluster):  # a cluster's client follows a failover by itself
                with suppress(Exception):  # each connection is closed all the same
                    await self.client.connection_pool.disconnect(inuse_connections=False)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _answers(self) -> bool:
        """Probe while half open: two PINGs, the first of which may have to connect."""
        try:
            for limit in (PROBE_SECONDS, self._seconds):
                async with asyncio.timeout(limit):
                    await self.client.execute_command("PING")
        except Exception as error:
            logger.debug("Redis: %s: %s", type(error).__name__, error)
            return _cannot_save(error)
        return True


def open_client(settings: Settings) -> Client:
    """Create the client of ``settings.redis_url``, which is validated already. It connects at its first command, and never retries;
    callers set their own limits."""
    assert settings.redis_url is not None
    url = urlsplit(settings.redis_url)
    options: dict[str, Any] = {
        "host": url.hostname,
        "port": url.port or DEFAULT_PORT,
        "credential_provider": _Credentials(url.username, url.password, settings.redis_password_file),
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": None,  # the link limits the time of each command as a whole
        "max_connections": MAX_CONNECTIONS,
        "driver_info": None,
        "protocol": 2,  # needs no handshake except AUTH; the replies used here are equal in RESP2 and RESP3
    }
    tls = url.scheme.startswith("rediss")
    if tls and settings.redis_ca_file:
        options["ssl_ca_certs"] = str(settings.redis_ca_file)
    if url.scheme.endswith("+cluster"):
        return RedisCluster(ssl=tls, **options)
    kind = _PackingSSLConnection if tls else _PackingConnection
    return Redis.from_pool(BlockingConnectionPool(timeout=None, connection_class=kind, db=int(url.path.strip("/") or 0), **options))


async def _close(client: Client) -> None:
    await client.aclose()
    if isinstance(client, RedisCluster):  # it keeps connections open if it was about to refresh its nodes
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")


def _packed(_: Connection, *args: Any) -> list[bytes]:
    """Return a command in Redis's protocol. The library's asyncio connections pack in Python, which takes twice as long for a
    hundred arguments."""
    packed: list[bytes] = HiredisRespSerializer().pack(*args)
    return packed


class _PackingConnection(Connection):
    pack_command = _packed


class _PackingSSLConnection(SSLConnection):
    pack_command = _packed


class _Credentials(CredentialProvider):
    """Reads the password file for every new connection, so that a changed password needs no restart."""

    def __init__(self, user: str | None, password: str | None, file: Path | None) -> None:
        self._user = user and unquote(user)
        self._password = password and unquote(password)
        self._file = file

    def get_credentials(self) -> Any:
        """Return user and password, the password alone for the default user, or nothing."""
        password = self._file.read_text().strip() if self._file else self._password
        if not password:
            return ()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> Any:
        """Return :meth:`get_credentials`. Reading the file may block, but it is one line and read only for a new connection."""
        return self.get_credentials()


def _cannot_save(error: Exception) -> bool:
    """Whether Redis refuses to write because it cannot save. Errors of scripts and pipelines have words before the code."""
    return isinstance(error, ResponseError) and "MISCONF" in str(error)


def _is_forbidden(error: Exception) -> bool:
    """Whether the user has no right to a command; scripts have other words for it, and no code."""
    in_script = isinstance(error, ResponseError) and "script can't run this command" in str(error)
    return in_script or isinstance(error, NoPermissionError)
