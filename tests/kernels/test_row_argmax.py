"""The places of the rows' largest elements, against torch's argmax."""

from __future__ import annotations

import math

import pytest
import torch

from yardstick_llm.kernels.row_argmax import BLOCK, row_argmax


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_argmax(size: int) -> None:
    for rows in (torch.randn(5, size), torch.randint(3, (5, size)).float(), torch.full((2, size), -math.inf), torch.empty(0, size)):
        assert torch.equal(row_argmax(rows), rows.argmax(-1))


def test_the_first_of_equals_in_several_blocks() -> None:
    rows = torch.zeros(3, 2 * BLOCK + 5)
    rows[0, [BLOCK - 1, BLOCK]] = rows[1, [2 * BLOCK, 2 * BLOCK + 4]] = rows[2, [BLOCK + 3, 2 * BLOCK + 4]] = 1.0
    assert row_argmax(rows).tolist() == [BLOCK - 1, 2 * BLOCK, BLOCK + 3]


def test_nan_is_the_largest() -> None:
    rows = torch.randn(2, 2 * BLOCK + 5)
    rows[0, BLOCK + 7] = rows[1, -1] = math.nan
    assert row_argmax(rows).tolist() == [BLOCK + 7, 2 * BLOCK + 4]
