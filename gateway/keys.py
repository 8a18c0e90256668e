"""API keys: the content of the key file, and the middleware that requires a key. ``gateway/http/auth.py`` follows the file.

The file is JSON; every field but ``name`` and ``sha256`` is optional::

    {"keys": [{"name": "ci", "sha256": "<hexadecimal SHA-256 of the key>", "models": ["ranker"], "requests_per_minute": 600,
               "tokens_per_minute": 1000000, "items_per_minute": 20000, "concurrency": 8, "expires": "2027-01-31T00:00:00Z",
               "group": "search", "weight": 2.0, "priority_min": -10, "priority_max": 10, "catalogues": "read", "admin": false}]}

Keys are random and long, so a plain hash is sufficient; ``printf %s "$KEY" | sha256sum`` computes one. A key is looked up by its
digest, so the time of a lookup depends only on the digest of the sent key and reveals nothing about the keys in the file.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec

from yardstick_llm.gateway.limits.limiter import Limits

SHARED_GROUP = ""
"""Trust group of every request if ``cache_isolation`` is "none". No entry of a file can name it."""
PRIORITY_RANGE = (-100, 100)
"""Allowed range of ``priority`` in requests, unless the key has its own range."""
EMPTY_KEY = hashlib.sha256(b"").hexdigest()

Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One entry of the key file."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """Name of the key's user, for people. Unique in its file."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$", max_length=64)]
    """Hexadecimal SHA-256 of the key. The length refuses a line break at the end, which the pattern alone accepts."""
    models: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    """The only models that the key may use; None for all."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Limit on tokens of prompts and completions together."""
    items_per_minute: Limit | None = None
    """Limit on scored items."""
    concurrency: Limit | None = None
    """Limit on requests in progress."""
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """Expiry time."""
    group: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Trust group: keys of one group share cached results and prefixes. None: the key shares with no other key."""
    weight: Annotated[float, msgspec.Meta(ge=0.1, le=100)] = 1.0
    """Share of busy engines, text workers and places for requests, relative to other keys."""
    priority_min: Priority = PRIORITY_RANGE[0]
    """Lowest ``priority`` that a request may use; requests with lower numbers run earlier."""
    priority_max: Priority = PRIORITY_RANGE[1]
    admin: bool = False
    """Whether the key may load and unload adapters, and sees names of keys and engines in ``/metrics``."""
    catalogues: Literal["write", "read"] = "write"
    """Whether the key may change the catalogues of its trust group, or only score their items."""

    def __post_init__(self) -> None:
        if self.priority_min > self.priority_max:
            raise ValueError(f"`priority_min` {self.priority_min} is greater than `priority_max` {self.priority_max}")

    @cached_property
    def id(self) -> str:
        """Name of the key in Redis and at engines; it does not reveal the key."""
        return self.sha256[:16].lower()

    @cached_property
    def limits(self) -> Limits:
        """All limits of the key."""
        return Limits((self.requests_per_minute, self.tokens_per_minute, self.items_per_minute), self.concurrency)

    @cached_property
    def expires_at(self) -> float:
        """Expiry time in seconds since 1970; infinite for a key without one."""
        return float("inf") if self.expires is None else self.expires.timestamp()

    @cached_property
    def cache_group(self) -> bytes:
        """Digest of the trust group, empty for the shared one. Group names and key digests do not leave the gateway."""
        if self.group == SHARED_GROUP:
            return b""
        kind, name = ("key", self.sha256.lower()) if self.group is None else ("group", self.group)
        return hashlib.blake2b(f"{kind}\0{name}".encode(), digest_size=16, person=b"yardstick-group").digest()

    @cached_property
    def cache_salt(self) -> str:
        """Salt of requests without a ``cache_salt`` of their own."""
        return self.cache_group.hex()


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the key file. Without entries, no key is valid."""

    keys: list[ApiKey]


class ParsedKeys(NamedTuple):
    """What a key file says."""

    keys: list[ApiKey]
    """Entries that count."""
    problems: list[str]
    """One message for each problem of entries that do not count; none contains a digest."""


class _Entries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[msgspec.Raw]


def parse_keys(content: bytes) -> ParsedKeys:
    """Return the valid entries of a key file, and what is wrong with the others. Raises :class:`ValueError` for another form."""
    decoded: list[ApiKey] = []
    problems: list[str] = []
    try:
        entries = msgspec.json.decode(content, type=_Entries).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    for place, raw in enumerate(entries):
        try:
            decoded.append(_entry.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"keys[{place}]: {error}")
    return ParsedKeys(_unambiguous(decoded, problems), problems)


def _unambiguous(keys: list[ApiKey], problems: list[str]) -> list[ApiKey]:
    """Return the ``keys`` whose rights and name are certain; add a message for each of the others to ``problems``.

    Entries with one digest are one key, and the file does not say which of their rights it has: neither counts. Entries with one
    name are different keys, which logs and metrics could not tell apart: the first counts.
    """
    owners: dict[str, list[str]] = {}  # names by digest
    for key in keys:
        owners.setdefault(key.sha256.lower(), []).append(key.name)
    for digest, names in owners.items():
        if digest == EMPTY_KEY:
            problems += [f"`sha256` of {name!r} is the hash of an empty key" for name in names]
        else:
            problems += [f"{names[0]!r} and {name!r} have the same `sha256`; neither counts" for name in names[1:]]
    known: dict[str, ApiKey] = {}
    for key in keys:
        digest = key.sha256.lower()
        if digest == EMPTY_KEY or len(owners[digest]) > 1:
            continue
        if key.name in known:
            problems.append(f"two keys are named {key.name!r}; the first one counts")
        else:
            known[key.name] = key
    return list(known.values())


_entry = msgspec.json.Decoder(ApiKey)
