"""The packed form of a registered item, in memory and in Redis.

=========  ==================================================================================
bytes      meaning
=========  ==================================================================================
16         digest of the content: equal items have equal digests, in every catalogue
8          expiry time in milliseconds since 1970; 0 for never
4          number of token ids
4 × ids    token ids, in the machine's byte order
the rest   *tail*: the last characters of the item, as UTF-8, whose tokens depend on the query
=========  ==================================================================================
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_HEADER = struct.Struct("<16sqI")
_EXPIRES = struct.Struct("<q")
DIGEST_BYTES = 16
_AFTER_EXPIRY = DIGEST_BYTES + _EXPIRES.size
PLACE_BYTES = 8
"""Bytes of the digest that place an item on a replica."""


class Content(NamedTuple):
    """The parts of a record that a prompt needs."""

    digest: bytes
    ids: memoryview
    """Token ids as bytes."""
    tail: bytes


def packed(ids: Sequence[int], tail: str) -> bytes:
    """Return the record of an item, which never expires."""
    content = array("I", ids).tobytes()
    written = tail.encode()
    # The length keeps ids and tail apart.
    digest = hashlib.blake2b(_EXPIRES.pack(len(ids)) + content + written, digest_size=DIGEST_BYTES).digest()
    return _HEADER.pack(digest, 0, len(ids)) + content + written


def with_expiry(record: bytes, expires: int) -> bytes:
    """Return ``record`` with an expiry time in milliseconds since 1970."""
    return record[:DIGEST_BYTES] + _EXPIRES.pack(expires) + record[_AFTER_EXPIRY:]


def content_of(record: bytes) -> Content:
    """Return the content of a record."""
    digest, _, count = _HEADER.unpack_from(record)
    end = _HEADER.size + 4 * count
    return Content(digest, memoryview(record)[_HEADER.size : end], record[end:])


def digest_of(record: bytes) -> bytes:
    """Return the digest of the content: the item's version."""
    return record[:DIGEST_BYTES]


def expiry_of(record: bytes) -> int:
    """Return the expiry time in milliseconds since 1970; 0 for never."""
    expires: int = _EXPIRES.unpack_from(record, DIGEST_BYTES)[0]
    return expires


def tokens_of(record: bytes) -> int:
    """Return the number of token ids."""
    count: int = _HEADER.unpack_from(record)[2]
    return count
