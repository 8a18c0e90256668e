"""Token ids as bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit integers, the least significant byte first."""
    if isinstance(ids, array) and ids.typecode == "I" and sys.byteorder == "little":
        return ids.tobytes()
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
