"""Estimates how often a key was used lately, in bounded memory."""

from __future__ import annotations

import numpy as np

ROWS = 4
MAX_COUNT = 255


class FrequencySketch:
    """A count-min sketch with conservative update and aging: TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage
    2017, https://arxiv.org/abs/1512.00727). An estimate is never below the true count since the last halvings, up to
    :data:`MAX_COUNT`.
    """

    def __init__(self, keys: int) -> None:
        """``keys``: about as many as are used in turn. Takes 4 to 8 bytes for each."""
        self._width = 1 << max(6, (keys - 1).bit_length())
        self._rows = [bytearray(self._width) for _ in range(ROWS)]
        self._uses = 0

    def use(self, key: int) -> int:
        """Count one use of ``key``: 64 bits, spread evenly. Return its new count."""
        a, b, c, d = self._rows
        i, j, k, m = self._places(key)
        least = min(a[i], b[j], c[k], d[m])
        if least < MAX_COUNT:
            for row, place in ((a, i), (b, j), (c, k), (d, m)):
                if row[place] == least:
                    row[place] = least + 1
        self._uses += 1
        return min(least + 1, MAX_COUNT)

    def count(self, key: int) -> int:
        """Estimate the recent uses of ``key``."""
        a, b, c, d = self._rows
        i, j, k, m = self._places(key)
        return min(a[i], b[j], c[k], d[m])

    def raise_to(self, key: int, count: int) -> None:
        """Make the estimate for ``key`` at least ``count``, as if it had been used as often."""
        for row, place in zip(self._rows, self._places(key), strict=True):
            row[place] = max(row[place], count)

    def age(self, uses: int) -> bool:
        """Halve all counts after a number of uses, so that old uses fade. Return whether they were halved."""
        if self._uses < uses:
            return False
        for row in self._rows:
            counts = np.frombuffer(row, np.uint8)
            np.right_shift(counts, 1, out=counts)
        self._uses //= 2
        return True

    def _places(self, key: int) -> tuple[int, int, int, int]:
        # Rows use different bits; more than 16 are needed in wide rows, so bits from the other end are mixed in.
        mask = self._width - 1
        return (
            (key ^ key << 13) & mask,
            (key >> 16 ^ key << 29) & mask,
            (key >> 32 ^ key << 45) & mask,
            (key >> 48 ^ key << 61) & mask,
        )
