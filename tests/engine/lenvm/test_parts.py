"""Which candidates a pass computes: each of a row exactly once, and not many others."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.lenvm.graphs import PARTS
from engine.lenvm.parts import WIDTHS, Parts, equal_parts, exact_parts


def verify(parts: Parts, counts: list[int], columns: int) -> None:
    """A row's first candidates have a branch each, whose place is theirs."""
    total = int(parts.branches.sum())
    assert len(parts.places) == total
    assert parts.branch_of.shape == (len(counts), columns)
    for row, count in enumerate(counts):
        branches = parts.branch_of[row, :count]
        assert len(set(branches.tolist())) == count
        assert parts.places[branches].tolist() == [row * columns + rank for rank in range(count)]
    starts = np.cumsum(parts.branches) - parts.branches
    for row, first, start in zip(parts.rows, parts.first, starts, strict=True):
        assert parts.branch_of[row, first] == start  # the branches of a part follow each other
    assert (parts.branch_of <= total).all()


@pytest.mark.parametrize("seed", range(20))
def test_each_candidate_has_a_branch(seed: int) -> None:
    rng = random.Random(seed)
    columns = rng.choice((2, 4, 8, 64))
    counts = [rng.randint(1, columns) for _ in range(rng.randint(1, 30))]
    parts = equal_parts(counts, columns)
    assert len(set(parts.branches.tolist())) == 1
    verify(parts, counts, columns)
    some = np.array([rng.choice((0, count)) for count in counts])
    parts = exact_parts(some, columns)
    assert parts.branches.tolist() == [count for count in some if count]
    verify(parts, some.tolist(), columns)


def computed(most: list[int]) -> int:
    """Branches of a captured pass, padding included."""
    parts = equal_parts(most, 8 if max(most) <= 8 else 64)
    return int(parts.branches[0]) * next(size for size in PARTS if size >= len(parts.rows))


@pytest.mark.parametrize(
    ("most", "expected", "before"),
    [
        ([5] * 16, 80, 128),
        ([5] * 100, 520, 832),
        ([8] * 100, 832, 832),
        ([5] * 99 + [64], 640, 6656),
        ([12] * 16, 240, 256),
        ([5] * 256, 1280, 2048),
        ([3] * 40 + [7] * 10, 320, 448),
    ],
)
def test_computed_branches(most: list[int], expected: int, before: int) -> None:
    """``before``: with one width for all rows, a power of two."""
    assert computed(most) == expected <= before
    rows = next(size for size in PARTS if size >= len(most))
    assert before == rows * (1 << (max(most) - 1).bit_length())


def test_the_width_computes_least() -> None:
    rng = random.Random(7)
    for _ in range(50):
        most = [rng.randint(1, 64) for _ in range(rng.randint(1, 20))]
        total = equal_parts(most, 64).branches.sum()
        assert total == min(width * sum(-(-count // width) for count in most) for width in WIDTHS)
