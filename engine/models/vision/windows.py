"""The order in which the tower computes the patches of an image: window by window, windows of one size together."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]

REMEMBERED = 256
"""Grids whose order is kept; the images of many requests have few sizes."""


class WindowRun(NamedTuple):
    """Consecutive patches, in the order of the tower, that make windows of one size."""

    begin: int
    end: int
    length: int
    """Patches of each window; divides ``end - begin``."""


class Grid(NamedTuple):
    """Order and places of the patches of images of one size."""

    order: Longs
    """[patches] place in :class:`engine.wire.Image` of each patch in the order of the tower"""
    inverse: Longs
    """[tokens] place, in the order of the tower, of each merged patch of the image"""
    places: Longs
    """[patches, 2] row and column of each patch of :class:`engine.wire.Image`"""
    windows: list[WindowRun]

    @property
    def tokens(self) -> int:
        """Merged patches."""
        return len(self.inverse)


@lru_cache(REMEMBERED)
def grid_of(rows: int, columns: int, merge: int, window: int) -> Grid:
    """rows, columns: of patches, multiples of ``merge``; window: side of a window, in merged patches."""
    high, wide, unit = rows // merge, columns // merge, merge**2
    row, column = np.divmod(np.arange(high * wide), wide)
    window_of = row // window * (-(-wide // window)) + column // window
    sizes = np.bincount(window_of)
    # Windows of one size together, each with its merged patches in the order of the image.
    merged = np.lexsort((np.arange(high * wide), window_of, sizes[window_of]))
    order = (merged[:, None] * unit + np.arange(unit)).flatten()
    inner_row, inner_column = np.divmod(np.arange(unit), merge)
    places = np.stack([row[:, None] * merge + inner_row, column[:, None] * merge + inner_column], 2).reshape(-1, 2)
    return Grid(order, np.argsort(merged), places, _runs(np.sort(sizes[sizes > 0]).astype(np.int64), unit))


def _runs(sizes: Longs, unit: int) -> list[WindowRun]:
    """sizes: merged patches of each window, in order."""
    lengths, counts = np.unique(sizes, return_counts=True)
    ends = np.cumsum(lengths * counts) * unit
    begins = [0, *ends[:-1].tolist()]
    return [
        WindowRun(begin, end, length) for begin, end, length in zip(begins, ends.tolist(), (lengths * unit).tolist(), strict=True)
    ]
