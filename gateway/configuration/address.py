"""Parser for the entries of the setting ``engines``."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"(?:(?P<namespace>{_LABEL})/)?(?P<service>{_LABEL}):(?P<port>{_LABEL})")


class StaticAddress(msgspec.Struct, frozen=True):
    """``http://host:port`` or ``https://host:port``: one engine."""

    url: str


class DnsAddress(msgspec.Struct, frozen=True):
    """``dns://name:port``: an engine at every address of a name, such as that of a headless Service."""

    host: str
    port: int


class ServiceAddress(msgspec.Struct, frozen=True):
    """``kubernetes://service:port`` or ``kubernetes://namespace/service:port``: an engine at every endpoint of a Service."""

    service: str
    port: int | str
    """Port number, or the port name in the Service."""
    namespace: str | None = None
    """None means the namespace of this gateway."""


Address = StaticAddress | DnsAddress | ServiceAddress


def parse_address(text: str) -> Address:
    """Parse an entry. Raises :class:`ValueError` with an example of a valid entry."""
    scheme, _, rest = text.partition("://")
    if scheme in ("http", "https"):
        return _static(text)
    if scheme == "dns":
        return _dns(text)
    if scheme == "kubernetes":
        return _service(rest)
    raise ValueError("write it like http://127.0.0.1:8100, dns://engines.default.svc:8100 or kubernetes://engines:http")


def _static(text: str) -> StaticAddress:
    parts = urlsplit(text)
    if not parts.hostname or not _has_port_or_none(text):
        raise ValueError("write it like http://127.0.0.1:8100")
    return StaticAddress(text.rstrip("/"))


def _dns(text: str) -> DnsAddress:
    parts = urlsplit(text)
    if not parts.hostname or not _has_port_or_none(text) or not parts.port or parts.path:
        raise ValueError("write it like dns://engines.default.svc:8100")
    return DnsAddress(parts.hostname, parts.port)


def _service(rest: str) -> ServiceAddress:
    match = _SERVICE.fullmatch(rest)
    if match is None:
        raise ValueError("write it like kubernetes://engines:http or kubernetes://models/engines:8100")
    port = match["port"]
    if port.isdecimal() and not 1 <= int(port) <= 65535:
        raise ValueError("a port is a name, or a number from 1 to 65535")
    return ServiceAddress(match["service"], int(port) if port.isdecimal() else port, match["namespace"])


def _has_port_or_none(text: str) -> bool:
    try:
        urlsplit(text).port  # noqa: B018  the property raises where the port is no number
    except ValueError:
        return False
    return True
