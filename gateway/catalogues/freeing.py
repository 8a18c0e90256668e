"""Frees large mappings in slices: freeing a hundred thousand records at once would block the event loop for 20 ms and more."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

FREED_AT_ONCE = 3000
"""Entries that are freed in one turn of the event loop, in about a millisecond."""


class Waste:
    """Mappings that nothing uses any more."""

    def __init__(self) -> None:
        self._mappings: deque[dict[Any, Any]] = deque()

    @property
    def entries(self) -> int:
        """Number of entries that are not freed yet."""
        return sum(map(len, self._mappings))

    def add(self, *mappings: dict[Any, Any]) -> None:
        """Empty ``mappings``, which nothing but the caller has, in the next turns of the event loop."""
        if not self._mappings:
            asyncio.get_running_loop().call_soon(self._free)
        self._mappings += mappings

    def _free(self) -> None:
        left = FREED_AT_ONCE
        while left > 0 and self._mappings:
            mapping = self._mappings[0]
            few = min(left, len(mapping))
            for _ in range(few):
                mapping.popitem()
            if not mapping:
                self._mappings.popleft()
            left -= few + 1
        if self._mappings:
            asyncio.get_running_loop().call_soon(self._free)
