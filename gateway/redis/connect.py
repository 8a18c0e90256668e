"""A client from the settings. Nothing is connected before the first command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from gateway.settings import Settings

Client = Redis | RedisCluster

MAX_CONNECTIONS = 64
"""To each node. At 0.1 ms a command that is far more than one gateway can use; a request that finds none free waits, within its
limit."""
CONNECT_SECONDS = 2.0
"""For the background's connections; a request's own limit is shorter."""
DEFAULT_PORT = 6379


def open_client(settings: Settings) -> Client:
    """``settings.redis_url``, which has been checked, as a client. It never retries: its users have limits of their own."""
    assert settings.redis_url is not None
    url = urlsplit(settings.redis_url)
    options: dict[str, Any] = {
        "host": url.hostname,
        "port": url.port or DEFAULT_PORT,
        "credential_provider": _Credentials(url.username, url.password, settings.redis_password_file),
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": None,  # of a command; `link.py` has one clock for all of it
        "max_connections": MAX_CONNECTIONS,
        "driver_info": None,
        "protocol": 2,  # no handshake but AUTH, and the replies used here look the same in both
    }
    tls = url.scheme.startswith("rediss")
    if tls and settings.redis_ca_file:
        options["ssl_ca_certs"] = str(settings.redis_ca_file)
    if url.scheme.endswith("+cluster"):
        return RedisCluster(ssl=tls, **options)
    kind = SSLConnection if tls else Connection
    return Redis.from_pool(BlockingConnectionPool(timeout=None, connection_class=kind, db=int(url.path.strip("/") or 0), **options))


async def read_values(client: Client, names: Sequence[bytes]) -> list[bytes | None]:
    """The values of ``names``: one MGET; in a cluster one for each slot, in one message a node and all nodes at once.

    Names could be made to share a slot by a tag. But what prompts have in common is the model, whose results would then all live
    on one node; the query is no tag, because a result's name does not depend on where a prompt is cut.
    """
    if isinstance(client, RedisCluster):
        return await client.mget_nonatomic(names)
    values: list[bytes | None] = await client.execute_command("MGET", *names)  # type: ignore[no-untyped-call]
    return values


async def close(client: Client) -> None:
    """Close all connections."""
    await client.aclose()
    if isinstance(client, RedisCluster):  # which keeps them where it was about to look at its nodes again
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")


class _Credentials(CredentialProvider):
    """Asked at every connection, so that a password that changes in its file needs no restart."""

    def __init__(self, user: str | None, password: str | None, file: Path | None) -> None:
        self._user = user and unquote(user)
        self._password = password and unquote(password)
        self._file = file

    def get_credentials(self) -> Any:
        """User and password, or the password alone for the default user, or nothing."""
        password = self._file.read_text().strip() if self._file else self._password
        if not password:
            return ()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> Any:
        """The same; the file is a line, and read only when a connection is made."""
        return self.get_credentials()
