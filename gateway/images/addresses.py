"""Which addresses an image may be fetched from: none that only machines of this network should reach."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host. Raises :class:`OSError`."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_USE_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_NEVER = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
"""Further networks: protocol assignments (with the metadata service of Oracle's cloud), relays of 6to4, and Azure's WireServer.
Some versions of Python take a part of the first for global."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``, in the order of preference. Raises :class:`OSError`."""
    records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in records))


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet: not private, shared, loopback, link-local (such as those of metadata
    services), multicast or reserved, and no IPv6 form of such an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # such as an address with a scope
        return False
    return all(map(_is_public, _forms(address)))


def _is_public(address: IpAddress) -> bool:
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    return not any(address in network for network in _NEVER)


def _forms(address: IpAddress) -> list[IpAddress]:
    """Return the address, or the IPv4 addresses that an IPv6 address stands for, which a gateway or a tunnel may reach."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if address in _LOCAL_USE_NAT64:
        return [ipaddress.IPv4Address("127.0.0.1")]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    if address.teredo is not None:
        return [address, *address.teredo]
    return [address]
