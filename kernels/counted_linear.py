"""The product of a linear layer for the first rows of its input only, whose number is known on the device alone.

The launch has a program for every block of rows, and programs of blocks beyond the count end at once. So the shapes of a CUDA graph
stay fixed while the work follows what an earlier kernel of the same step decided. Rows beyond the count are not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl


def counted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor) -> Tensor:
    """``x · weightᵀ + bias`` for the first ``count`` rows.

    x: [rows, in]; weight: [out, in]; bias: [out]; count: [1] int64, which the host does not read on a GPU. -> [rows, out],
    undefined beyond the first ``count`` rows.
    """
    operation = counted_linear_triton if launches(x, weight) else counted_linear_reference
    return operation(x, weight, bias, count)


def counted_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor) -> Tensor:
    """:func:`counted_linear` in plain PyTorch, which computes all rows and makes the undefined ones NaN."""
    beyond = torch.arange(len(x), device=x.device) >= count
    return linear(x, weight, bias).masked_fill(beyond.unsqueeze(1), float("nan"))


def counted_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor) -> Tensor:
    """:func:`counted_linear` on a GPU. All contiguous; x, weight and bias of one dtype.

    Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    expect_device("x", x)
    (rows, size), columns = x.shape, len(weight)
    expect("x", x, x, (rows, size), FLOATS)
    expect("weight", weight, x, (columns, size), (x.dtype,))
    expect("count", count, x, (1,), (torch.int64,))
    if bias is not None:
        expect("bias", bias, x, (columns,), (x.dtype,))
    out = x.new_empty((rows, columns))
    tile, step = (32, 32) if x.dtype == torch.float32 else (128, 64)
    # Programs of one block of columns follow each other, so that the weights are read from memory once.
    grid = (-(-rows // tile), -(-columns // tile))
    _counted_linear[grid](
        x, weight, weight if bias is None else bias, out, count, rows, columns, size, tile, step, bias is not None,
        num_warps=8 if tile > 64 else 4, num_stages=3,
    )  # fmt: skip
    return out


@jit("rows")
def _counted_linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Each program computes TILE rows and columns."""
    first = tl.program_id(0) * TILE
    end = tl.minimum(tl.load(count), rows)
    if first < end:
        row = first + tl.arange(0, TILE)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        step = tl.arange(0, STEP)
        left = x + row.to(tl.int64)[:, None] * SIZE + step[None, :]
        right = weight + column.to(tl.int64)[None, :] * SIZE + step[:, None]
        acc = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, SIZE, STEP):
            inside = step < SIZE - start
            a = tl.load(left + start, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=(column < COLUMNS)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        cell = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out + cell, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < COLUMNS)[None, :])
