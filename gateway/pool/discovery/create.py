"""Creates the discovery source for an entry of the setting ``engines``."""

from __future__ import annotations

from gateway.pool.discovery.base import Discovery
from gateway.pool.discovery.dns import Dns
from gateway.pool.discovery.static import Static
from gateway.settings import DnsAddress, ServiceAddress, parse_address


def discover(entry: str, *, resolve_seconds: float) -> Discovery:
    """Return the source for ``entry``. Raises :class:`ValueError` for an invalid entry."""
    address = parse_address(entry)
    if isinstance(address, ServiceAddress):
        from gateway.pool.discovery.kubernetes import EndpointSlices

        return EndpointSlices(address)
    if isinstance(address, DnsAddress):
        return Dns(address.host, address.port, resolve_seconds=resolve_seconds)
    return Static(address.url)
