"""Which candidates of some guided draws the length model computes in one pass, as the pass and the draws index them.

A *part* is some candidates of one row, which the pass computes as one-token branches behind the row's text. On a GPU all parts have
the same width, so that one captured pass serves rows with any numbers of candidates: a row with more than that has several parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.attention_layout import within

WIDTHS = (5, 8)
"""Widths of parts on a GPU: the default ``top_k``, which nearly all requests use, and one that wastes less on many candidates."""

Longs = npt.NDArray[np.int64]


class Parts(NamedTuple):
    """Parts of the candidates in a table [rows, columns], in which a row's candidates come first."""

    rows: Longs
    """[parts] row of each part"""
    first: Longs
    """[parts] column of its first candidate"""
    branches: Longs
    """[parts] number of its candidates, beyond those that the row has included"""
    places: Longs
    """[branches of all parts] place of each in the flattened table"""
    branch_of: Longs
    """[rows, columns] branch that computes the candidate there, or the number of all branches where there is none"""


def equal_parts(most: Sequence[int], columns: int) -> Parts:
    """Parts of one of :data:`WIDTHS`, the one that computes fewest branches. most: candidates that each row has at most."""
    limits = np.array(most, np.int64)
    width = min(reversed(WIDTHS), key=lambda width: width * int((-(-limits // width)).sum()))
    parts = -(-limits // width)
    rows, first = np.repeat(np.arange(len(limits)), parts), within(parts) * width
    return _indexed(rows, first, np.full(len(rows), width), (len(limits), columns))


def exact_parts(counts: Longs, columns: int) -> Parts:
    """One part for each row with candidates that need a value. counts: number of these, 0 for rows that are decided."""
    rows = np.flatnonzero(counts)
    return _indexed(rows, np.zeros_like(rows), counts[rows], (len(counts), columns))


def _indexed(rows: Longs, first: Longs, branches: Longs, shape: tuple[int, int]) -> Parts:
    row, column = np.repeat(rows, branches), np.repeat(first, branches) + within(branches)
    inside = np.flatnonzero(column < shape[1])
    branch_of = np.full(shape, len(column), np.int64)
    branch_of[row[inside], column[inside]] = inside
    return Parts(rows, first, branches, row * shape[1] + np.minimum(column, shape[1] - 1), branch_of)
