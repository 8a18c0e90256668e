"""Arrays of token ids and slot numbers on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
"""Token ids or slot numbers, one dimension."""

EMPTY: Ints = np.empty(0, np.int32)


class IntBuffer:
    """A growing run of int32."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: Sequence[int] | Ints = ()) -> None:
        self._data: Ints = np.array(values, np.int32)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    def extend(self, values: Sequence[int] | Ints) -> None:
        """Append ``values``, in amortised constant time for each."""
        end = self._size + len(values)
        if end > len(self._data):
            grown = np.empty(max(end, 2 * len(self._data)), np.int32)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : end] = values
        self._size = end

    def drop(self, count: int) -> Ints:
        """Forget the last ``count`` values; returns them, valid until the next change."""
        self._size -= count
        return self._data[self._size : self._size + count]

    def clear(self) -> None:
        """Forget all values."""
        self._data = EMPTY
        self._size = 0

    @property
    def view(self) -> Ints:
        """The values, not copied: valid until the next change."""
        return self._data[: self._size]


def as_ints(parts: Iterable[Ints]) -> Ints:
    """Concatenate, also nothing."""
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else EMPTY
