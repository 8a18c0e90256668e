"""The pool of slots. One slot holds one token's keys and values in every layer; the page size is one token."""

from __future__ import annotations

import numpy as np

from engine.ints import Ints


class SlotPool:
    """Hands out slot numbers and takes them back; knows nothing of what is in them.

    Free slots are a stack in one array, so that both calls are a copy of a slice, whatever the pool's size.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._stack: Ints = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.available = size

    def allocate(self, count: int) -> Ints:
        """``count`` slots; the caller has made sure that so many are free."""
        assert 0 <= count <= self.available, (count, self.available)
        self.available -= count
        return self._stack[self.available : self.available + count][::-1].copy()

    def free(self, slots: Ints) -> None:
        """Take ``slots`` back."""
        end = self.available + len(slots)
        assert end <= self.size, "a slot was released twice"
        self._stack[self.available : end] = slots[::-1]
        self.available = end

    @property
    def free_slots(self) -> Ints:
        """The numbers of the free slots, for integrity checks."""
        return self._stack[: self.available]
