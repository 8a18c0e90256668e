"""The addresses of hosts: how names are resolved, and which addresses an image may be fetched from, which are none that only
machines of this network should reach."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.limits.places import FairPlaces
from gateway.process.fair_room import Tenant

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host, and may take long. Raises :class:`OSError`, and :class:`UnicodeError` for an odd name."""

MAX_LOOKUPS = 64
"""Most threads that resolve names at a time; more lookups wait."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_USE_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_NEVER = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
"""Further networks: protocol assignments (with the metadata service of Oracle's cloud), relays of 6to4, and Azure's WireServer.
Some versions of Python take a part of the first for global."""


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``, in the order of preference. Raises what :data:`Lookup` does."""
    return list(dict.fromkeys(str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


class Resolver:
    """Resolves names that clients choose, in threads of its own.

    A lookup cannot be stopped, and a name may take as long as its owner likes. In the event loop's own threads, such lookups would
    hold up those of engines and all other work there. A place is therefore taken until the thread ends, also where the request that
    asked has ended before, and a tenant leaves places for others. The threads do not keep the process from ending.
    """

    def __init__(self, lookup: Lookup = look_up, most: int = MAX_LOOKUPS) -> None:
        self._lookup = lookup
        self._places = FairPlaces(most)

    async def addresses(self, host: str, port: int, tenant: Tenant) -> Sequence[str]:
        """Return the addresses of ``host``. Raises what :data:`Lookup` does."""
        await self._places.take(tenant)
        answer: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()

        def ended(answer: asyncio.Future[Sequence[str]]) -> None:
            self._places.give(tenant)
            answer.exception()  # marks it as retrieved, because the caller may have left

        answer.add_done_callback(ended)
        try:
            threading.Thread(target=_answer, args=(self._lookup, host, port, answer), name="image-names", daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads
            answer.set_exception(OSError(str(error)))
        return await asyncio.shield(answer)


def _answer(lookup: Lookup, host: str, port: int, answer: asyncio.Future[Sequence[str]]) -> None:
    """Look up a host in this thread."""
    try:
        found: Sequence[str] | Exception = lookup(host, port)
    except Exception as error:
        found = error

    def deliver() -> None:
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    with suppress(RuntimeError):  # the event loop has ended
        answer.get_loop().call_soon_threadsafe(deliver)


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
