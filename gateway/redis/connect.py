"""Creates Redis clients from the settings. A client connects at its first command."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.credentials import CredentialProvider

from gateway.settings import Settings

Client = Redis | RedisCluster

MAX_CONNECTIONS = 64
"""Most connections to each node. At 0.1 ms per command this is far more than one gateway can use. A command that finds no free
connection waits within its time limit."""
CONNECT_SECONDS = 2.0
"""Connect timeout. It matters to background work only; the limit of a request is shorter."""
DEFAULT_PORT = 6379


def open_client(settings: Settings) -> Client:
    """Create the client of ``settings.redis_url``, which is validated already. It never retries; callers set their own limits."""
    assert settings.redis_url is not None
    url = urlsplit(settings.redis_url)
    options: dict[str, Any] = {
        "host": url.hostname,
        "port": url.port or DEFAULT_PORT,
        "credential_provider": _Credentials(url.username, url.password, settings.redis_password_file),
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": None,  # `link.py` limits the time of each command as a whole
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


async def read_values(client: Client, names: Sequence[bytes]) -> list[bytes | None]:
    """Return the values of ``names`` with one MGET; in a cluster, with one MGET per slot, pipelined per node, on all nodes at once.

    A hash tag could place related names in one slot. The only common part of prompts that a name could use is the model, and a
    tag of it would put all results of a model on one node. The query cannot be the tag, because the name of a result does not
    depend on the division of its prompt.
    """
    if isinstance(client, RedisCluster):
        return await client.mget_nonatomic(names)
    values: list[bytes | None] = await client.execute_command("MGET", *names)  # type: ignore[no-untyped-call]
    return values


async def drop_idle(client: Client) -> None:
    """Close the connections that no command uses. A cluster's client follows a failover by itself."""
    if not isinstance(client, RedisCluster):
        with suppress(Exception):  # each of them is closed all the same
            await client.connection_pool.disconnect(inuse_connections=False)


async def close(client: Client) -> None:
    """Close all connections."""
    await client.aclose()
    if isinstance(client, RedisCluster):  # it keeps connections open if it was about to refresh its nodes
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")


class _Packing:
    """Packs commands with hiredis. The library's asyncio connections pack in Python, which takes twice as long for a hundred
    arguments."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return a command in Redis's protocol."""
        packed: list[bytes] = HiredisRespSerializer().pack(*args)
        return packed


class _PackingConnection(_Packing, Connection):
    pass


class _PackingSSLConnection(_Packing, SSLConnection):
    pass


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
