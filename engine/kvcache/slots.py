"""Pool of slots. One slot holds one token's keys and values in every layer, so the page size is one token."""

from __future__ import annotations

import numpy as np

from engine.ints import Ints


class SlotPool:
    """Allocates and frees slot numbers. It does not know their contents.

    Free slots are a stack in one array, so both calls copy one slice, whatever the size of the pool.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._stack: Ints = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.available = size

    def allocate(self, count: int) -> Ints:
        """``count`` slots. The caller has checked that as many are available."""
        assert 0 <= count <= self.available, (count, self.available)
        self.available -= count
        found = self._stack[self.available : self.available + count]
        return found.copy() if count == 1 else found[::-1].copy()

    def free(self, slots: Ints) -> None:
        """Return ``slots`` to the pool."""
        end = self.available + len(slots)
        assert end <= self.size, "a slot was released twice"
        self._stack[self.available : end] = slots[::-1]
        self.available = end

    @property
    def free_slots(self) -> Ints:
        """The numbers of the free slots, for integrity checks."""
        return self._stack[: self.available]
