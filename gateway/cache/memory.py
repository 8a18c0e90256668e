"""The in-process cache: bounded, and evicts the least recently used results first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from gateway.cache.base import Row

ENTRY_BYTES = 250
"""Bytes of an entry, measured with CPython 3.11: a 16-byte key, its slot in the ordered dictionary, and an empty tuple."""
LABEL_BYTES = 32
"""Bytes of a float and the reference to it."""


class MemoryCache:
    """Holds at most ``max_entries`` results that take at most about ``max_bytes``; if either is 0, it holds nothing."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._results: OrderedDict[bytes, Row] = OrderedDict()  # least recently used first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    async def get_many(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Return the value of each key; found keys become the most recently used."""
        results = [self._results.get(key) for key in keys]
        for key, result in zip(keys, results, strict=True):
            if result is not None:
                self._results.move_to_end(key)
        return results

    async def put_many(self, results: Mapping[bytes, Row]) -> None:
        """Store ``results`` and evict the least recently used entries beyond the bounds."""
        for key, row in results.items():
            if key in self._results:
                continue
            self._results[key] = row
            self.bytes += ENTRY_BYTES + LABEL_BYTES * len(row)  # as _size; a call for each of many rows takes longer
        while len(self._results) > self._max_entries or self.bytes > self._max_bytes:
            self.bytes -= _size(self._results.popitem(last=False)[1])


def _size(row: Row) -> int:
    return ENTRY_BYTES + LABEL_BYTES * len(row)
