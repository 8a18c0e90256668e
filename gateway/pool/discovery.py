"""Where engines are: at fixed addresses, at those of a DNS name, or behind a Kubernetes Service (``kubernetes.py``)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence

import msgspec

from yardstick_llm.gateway.settings import DnsAddress, ServiceAddress, parse_address

logger = logging.getLogger(__name__)


class Endpoint(msgspec.Struct, frozen=True, order=True):
    """Address of one engine."""

    url: str
    draining: bool = False
    """The engine is terminating: open requests may finish, new ones go elsewhere."""


Source = AsyncGenerator[Sequence[Endpoint], None]
"""Yields all endpoints of an entry, first the current ones and then after every change, without end. Raises nothing: a source that
fails is asked again later, and the last result stays valid until then."""


def discover(entry: str, *, resolve_seconds: float) -> Source:
    """Return the source for ``entry``. Raises :class:`ValueError` for an invalid entry."""
    address = parse_address(entry)
    if isinstance(address, ServiceAddress):
        from yardstick_llm.gateway.pool.kubernetes import endpoint_slices  # importing the package takes half a second

        return endpoint_slices(address)
    if isinstance(address, DnsAddress):
        return resolved(address.host, address.port, resolve_seconds=resolve_seconds)
    return fixed(address.url)


async def fixed(url: str) -> Source:
    """Yield one engine, once."""
    yield [Endpoint(url)]


async def resolved(host: str, port: int, *, resolve_seconds: float) -> Source:
    """Yield one endpoint for each A and AAAA record of ``host``. A failed lookup changes nothing, because a headless Service
    without ready pods has no records either, and a resolver may fail; probes decide whether the known engines still answer."""
    known: list[Endpoint] = []
    failing = False
    while True:
        try:
            records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not failing:
                logger.warning("%s cannot be resolved (%s); the engines stay as they were", host, error)
            failing = True
        else:
            failing = False
            found = sorted({Endpoint(http_url(str(address[0]), port)) for *_, address in records})
            if found != known:
                yield (known := found)
        await asyncio.sleep(resolve_seconds)


def http_url(host: str, port: int) -> str:
    """Return the base URL of a server; ``host`` may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
