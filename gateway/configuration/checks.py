"""Checks of single settings of the gateway, and the error of a setting that is not valid."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from gateway.configuration.address import parse_address
from tracing.export import TracingError
from tracing.setup import check_endpoint

PREFIX = "YARDSTICK_"
_IMAGE_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
FLAGS = {
    "engines": "--engine",
    "host": "--host",
    "port": "--port",
    "api_keys_file": "--api-keys-file",
    "redis_url": "--redis-url",
    "presets": "--preset",
    "tool_parsers": "--tool-parser",
    "reasoning_parsers": "--reasoning-parser",
    "aliases": "--alias",
    "fallbacks": "--fallback",
    "image_hosts": "--image-host",
}
"""Options of the command line, by setting."""


class SettingsError(ValueError):
    """A setting is unknown, missing or invalid. The message is one line that names the setting and the remedy."""


def invalid(name: str, problem: str, remedy: str) -> SettingsError:
    """Return the error of the setting ``name``."""
    flag = FLAGS.get(name)
    return SettingsError(f"{PREFIX}{name.upper()}{f' ({flag})' if flag else ''}: {problem}; {remedy}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_engine(entry: str) -> None:
    """Check an entry of ``engines``. Raises :class:`SettingsError`."""
    try:
        parse_address(entry)
    except ValueError as error:
        raise invalid("engines", f"{entry!r} is not a URL of an engine", str(error)) from None


def check_origin(origin: str) -> None:
    """Check an origin as browsers send it (RFC 6454 7.1), or ``*``. Raises :class:`SettingsError`."""
    parts = urlsplit(origin)
    known = parts.scheme in ("http", "https") and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and (not known or "*" in origin):
        raise invalid("cors_origins", f"{origin!r} is not an origin", "write it like https://app.example:8443, or *")


def check_image_hosts(entries: Iterable[str]) -> None:
    """Check the entries of ``image_hosts``. Raises :class:`SettingsError`."""
    for entry in entries:
        if not _IMAGE_HOST.fullmatch(entry):
            remedy = "write it like images.example.com or images.example.com:8443"
            raise invalid("image_hosts", f"{entry!r} is not a host", remedy)


def check_redis_url(url: str) -> None:
    """Check a Redis URL. Raises :class:`SettingsError`, whose message does not contain the URL, which may hold a password."""
    likeness = "write it like redis://HOST:6379/0, rediss://USER@HOST or redis+cluster://HOST"
    try:
        parts = urlsplit(url)
        known = parts.scheme in REDIS_SCHEMES and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # an invalid port
        known = False
    if not known:
        raise invalid("redis_url", "it is not a URL of Redis", likeness)
    database = parts.path.strip("/")
    if database and (parts.scheme.endswith("+cluster") or not database.isascii() or not database.isdigit()):
        raise invalid("redis_url", f"{database!r} is not a database here", f"{likeness}; clusters have only one")


def check_tracing_endpoint(endpoint: str) -> None:
    """Check the URL of a collector. Raises :class:`SettingsError`, whose message does not contain the URL."""
    try:
        check_endpoint(endpoint)
    except TracingError as error:
        raise invalid("tracing_endpoint", "it is not the URL of a collector", str(error)) from None
