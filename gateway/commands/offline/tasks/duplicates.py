"""Finds a name that two rows of a file have, in memory that does not grow with the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.commands.offline.rows import Row

_BYTES = 1 << 24
"""Size of the table of bits. Among a million names, some 4,000 share a bit with another by accident; these are kept in the second
pass."""


@dataclass(frozen=True)
class Duplicate:
    """A name, and the lines of the first two rows that have it."""

    name: str
    first: int
    second: int


def first_duplicate(rows: Callable[[], Iterator[Row]], name_of: Callable[[Row], str | None]) -> Duplicate | None:
    """Return the first row whose name an earlier row has; None if there is none. ``rows`` is called once or twice."""
    bits, shared = bytearray(_BYTES), set[int]()
    for row in rows():
        if (name := name_of(row)) is not None:
            place = hash(name) % (8 * _BYTES)
            if bits[place >> 3] >> (place & 7) & 1:
                shared.add(place)
            bits[place >> 3] |= 1 << (place & 7)
    if not shared:
        return None
    lines: dict[str, int] = {}
    for row in rows():
        if (name := name_of(row)) is not None and hash(name) % (8 * _BYTES) in shared:
            if name in lines:
                return Duplicate(name, lines[name], row.line)
            lines[name] = row.line
    return None
