"""The first rows of a product: the kernel and the reference against the plain product, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.counted_linear import counted_linear, counted_linear_reference, counted_linear_triton

SHAPES = [(1, 16, 16, 1), (70, 40, 50, 33), (40, 70, 33, 40), (70, 64, 32, 0), (33, 32, 130, 32)]
"""(rows, in, out, count): sizes that fill no block, all rows, none, and a count that is a whole number of blocks."""


def inputs(rows: int, size: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, size), (columns, size), (columns,))
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int, int], biased: bool, device: torch.device) -> None:
    *sizes, count = shape
    x, weight, bias = inputs(*sizes, device)
    there = torch.tensor([count], device=device)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    for operation in (counted_linear, counted_linear_reference, counted_linear_triton):
        found = operation(x, weight, bias if biased else None, there)
        assert found.shape == (sizes[0], sizes[2])
        torch.testing.assert_close(found[:count].double(), expected[:count], atol=2e-5, rtol=1e-5)


def test_half_precision(device: torch.device) -> None:
    x, weight, bias = inputs(40, 64, 48, device, torch.float16)
    expected = torch.nn.functional.linear(x, weight, bias)
    found = counted_linear_triton(x, weight, bias, torch.tensor([30], device=device))
    torch.testing.assert_close(found[:30], expected[:30], atol=0.02, rtol=5e-3)


def test_rows_beyond_the_count_are_neither_read_nor_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN there does not reach the others, and memory that was there before stays."""
    x, weight, _ = inputs(70, 32, 20, device)
    expected = x @ weight.T
    x[40:] = torch.nan
    room = torch.full((70, 20), 7.0, device=device)
    make = torch.Tensor.new_empty

    def given(self: Tensor, *shape: object, **kind: object) -> Tensor:
        return room if shape == ((70, 20),) else make(self, *shape, **kind)

    monkeypatch.setattr(torch.Tensor, "new_empty", given)
    assert counted_linear_triton(x, weight, None, torch.tensor([40], device=device)) is room
    torch.testing.assert_close(room[:40], expected[:40])
    assert (room[40:] == 7.0).all()
    assert counted_linear_reference(x, weight, None, torch.tensor([40], device=device))[40:].isnan().all()
