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

from gateway.text.prepared import ID_BYTES, PlacedIds

_HEADER = struct.Struct("<16sqI")
_EXPIRES = struct.Struct("<q")
DIGEST_BYTES = 16
_AFTER_EXPIRY = DIGEST_BYTES + _EXPIRES.size
_PLACE_AND_COUNT = struct.Struct("<Q16xI")
"""The first 8 bytes of the digest, which place an item on a replica, and the number of token ids."""


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


def row_of(record: bytes) -> tuple[PlacedIds, bytes]:
    """Return the token ids of a record, and its tail."""
    place, count = _PLACE_AND_COUNT.unpack_from(record)
    end = _HEADER.size + ID_BYTES * count
    row = PlacedIds("I", record[_HEADER.size : end])
    row.place = place
    row.content = record[:DIGEST_BYTES]
    return row, record[end:]


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


def tail_bytes(record: bytes) -> int:
    """Return the length of the tail."""
    return len(record) - _HEADER.size - ID_BYTES * tokens_of(record)
