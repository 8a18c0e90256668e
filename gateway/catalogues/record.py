"""The packed form of a registered item, in memory and in Redis.

=========  ==================================================================================
bytes      meaning
=========  ==================================================================================
16         digest of the content: equal items have equal digests, in every catalogue
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

_HEADER = struct.Struct("<16sI")
HEADER_BYTES = _HEADER.size
DIGEST_BYTES = 16
_PLACE_AND_COUNT = struct.Struct("<Q8xI")
"""The first 8 bytes of the digest, which place an item on a replica, and the number of token ids."""


def packed(ids: Sequence[int], tail: str) -> bytes:
    """Return the record of an item."""
    content = array("I", ids).tobytes()
    written = tail.encode()
    # The length keeps ids and tail apart.
    digest = hashlib.blake2b(struct.pack("<q", len(ids)) + content + written, digest_size=DIGEST_BYTES).digest()
    return _HEADER.pack(digest, len(ids)) + content + written


def row_of(record: bytes) -> tuple[PlacedIds, bytes]:
    """Return the token ids of a record, and its tail."""
    place, count = _PLACE_AND_COUNT.unpack_from(record)
    end = HEADER_BYTES + ID_BYTES * count
    row = PlacedIds("I", record[HEADER_BYTES:end])
    row.place = place
    row.content = record[:DIGEST_BYTES]
    return row, record[end:]


def digest_of(record: bytes) -> bytes:
    """Return the digest of the content: the item's version."""
    return record[:DIGEST_BYTES]


def tokens_of(record: bytes) -> int:
    """Return the number of token ids."""
    count: int = _HEADER.unpack_from(record)[1]
    return count


def tail_bytes(record: bytes) -> int:
    """Return the length of the tail."""
    return len(record) - HEADER_BYTES - ID_BYTES * tokens_of(record)
