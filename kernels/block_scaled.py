"""Products in FP8 (e4m3) where each block of the weight has a scale, and each row of activations has one for as many columns.

Sums of one block of columns are scaled before they are added up, in float32. Source: DeepSeek-V3, ``inference/kernel.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.quantize import FP8, quantize_rows
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl

SIDES = 32, 64, 128, 256
"""Widths of blocks that the kernel takes."""


def quantize_groups(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, in] e4m3 and scales [rows, in / width] float32 of ``x``, [rows, in]."""
    codes, scales = quantize_rows(x.contiguous().view(-1, width))
    return codes.view(x.shape), scales.view(len(x), -1)


def block_scaled_linear(
    x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``x · weightᵀ + bias``, in ``dtype``.

    x: codes and scales from :func:`quantize_groups`; weight: [out, in] e4m3; scales: [out / height, in / width] float32, rounded
    up; block: (height, width), where the width is one of :data:`SIDES` and divides in; bias: [out] of ``dtype``. -> [rows, out]
    """
    operation = block_scaled_linear_triton if launches(x[0], weight) else block_scaled_linear_reference
    return operation(x, weight, scales, block, bias, dtype)


def block_scaled_linear_reference(
    x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """:func:`block_scaled_linear` in plain PyTorch."""
    codes, x_scales = x
    height, width = block
    of_rows = scales.repeat_interleave(height, 0)[: len(weight)]
    out = codes.new_zeros((len(codes), len(weight)), dtype=torch.float32)
    for index, (left, right) in enumerate(zip(torch.split(codes, width, 1), torch.split(weight, width, 1), strict=True)):
        out += linear(left.float(), right.float()) * x_scales[:, index, None] * of_rows[:, index]
    return (out if bias is None else out + bias).to(dtype)


def block_scaled_linear_triton(
    x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """:func:`block_scaled_linear` on a GPU that multiplies e4m3. All contiguous.

    Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    codes, x_scales = x
    (rows, size), columns, (height, width) = codes.shape, len(weight), block
    if width not in SIDES or size % width or dtype not in FLOATS:
        raise ValueError(f"blocks of {width} columns of {size} in {dtype}, where one of {SIDES} is expected that divides them")
    expect_device("x", codes)
    expect("x", codes, codes, (rows, size), (FP8,))
    expect("scales of x", x_scales, codes, (rows, size // width), (torch.float32,))
    expect("weight", weight, codes, (columns, size), (FP8,))
    expect("scales of weight", scales, codes, (-(-columns // height), size // width), (torch.float32,))
    if bias is not None:
        expect("bias", bias, codes, (columns,), (dtype,))
    out = codes.new_empty((rows, columns), dtype=dtype)
    few = rows <= 16
    row_tile, column_tile = (16, 32) if few else (64, 128)
    _block_scaled[(-(-rows // row_tile), -(-columns // column_tile))](
        codes, x_scales, weight, scales, out if bias is None else bias, out, rows, columns, size, height, width, bias is not None,
        row_tile, column_tile, min(width, 128), num_warps=4, num_stages=4 if few else 3,
    )  # fmt: skip
    return out


@jit("rows")
def _block_scaled(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Each program computes ROW_TILE rows and COLUMN_TILE columns."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    step = tl.arange(0, STEP)
    inside, real = column < COLUMNS, row < rows
    blocks: tl.constexpr = SIZE // WIDTH
    left = x + row.to(tl.int64)[:, None] * SIZE + step[None, :]
    right = weight + column.to(tl.int64)[None, :] * SIZE + step[:, None]
    acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, SIZE, STEP):
        a = tl.load(left + start, mask=real[:, None], other=0.0)
        b = tl.load(right + start, mask=inside[None, :], other=0.0)
        of_rows = tl.load(x_scales + row.to(tl.int64) * blocks + start // WIDTH, mask=real, other=0.0)
        of_columns = tl.load(scales + column // HEIGHT * blocks + start // WIDTH, mask=inside, other=0.0)
        acc += tl.dot(a, b) * of_rows[:, None] * of_columns[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    cell = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


__all__ = ["SIDES", "block_scaled_linear", "block_scaled_linear_reference", "block_scaled_linear_triton", "quantize_groups"]
