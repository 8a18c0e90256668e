"""The pool of slots. One slot holds one token's keys and values in every layer; the page size is one token."""

from __future__ import annotations

import numpy as np

from engine.core import Ints


class SlotPool:
    """Hands out slot numbers and takes them back; knows nothing of what is in them.

    Free slots are a stack in one array, so that both calls are a copy of a slice, whatever the pool's size.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._stack: Ints = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.free = size

    def allocate(self, count: int) -> Ints:
        """``count`` slots; the caller has made sure that so many are free."""
        assert 0 <= count <= self.free, (count, self.free)
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def release(self, slots: Ints) -> None:
        """Take ``slots`` back."""
        end = self.free + len(slots)
        assert end <= self.size, "a slot was released twice"
        self._stack[self.free : end] = slots[::-1]
        self.free = end

    @property
    def free_slots(self) -> Ints:
        """The numbers of the free slots, for integrity checks."""
        return self._stack[: self.free]
