"""Products with weights in codes of 4 or 8 bits, whose groups of columns have scales; activations stay as they are.

A weight is ``(codes - zeros) · scales + offsets``; two codes of 4 bits share a byte. On a GPU, each program makes a tile of the
weight dense and multiplies with it, so the memory is read in the codes' size. On a CPU, a part of the weight is made dense for each
product, which takes longer than a dense weight does; :mod:`kernels.int8` multiplies with the codes, and rounds activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yardstick_llm.kernels.grouped_experts import Blocks, block_pairs, pairs_by_expert
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.quantize import FP8
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl

HALVES = 64, 32
"""Columns whose codes of 4 bits are the low halves of successive bytes; the high halves are those of as many columns after them."""
STEPS = 64, 32, 16
"""Columns of 8 bits that a program multiplies at a time; groups are multiples of one of them."""
ROW_TILES = 16, 64
"""Rows of a program: of a product of at most as many rows, and of others."""
CHUNK = 1 << 20
"""Elements of a weight that are made dense at a time on a CPU."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in] of codes."""

    codes: Tensor
    """8 bits: [out, in] int8, uint8 or e4m3. 4 bits: [out, in / 2] uint8, see :data:`HALVES`."""
    scales: Tensor
    """[out, groups], in the dtype of the activations, like the others"""
    zeros: Tensor | None = None
    """Codes that stand for 0, whole numbers."""
    offsets: Tensor | None = None
    """Added to what codes and scales make; not beside ``zeros``."""
    half: int = 0
    """One of :data:`HALVES`; 0: 8 bits."""

    def rows(self, rows: slice) -> Codes:
        """Some of the outputs."""
        zeros, offsets = (None if part is None else part[rows] for part in (self.zeros, self.offsets))
        return Codes(self.codes[rows], self.scales[rows], zeros, offsets, self.half)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.codes), self.codes.shape[1] * (2 if self.half else 1)

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]


def half_of(columns: int, group: int) -> int | None:
    """The one of :data:`HALVES` in which codes of 4 bits can be packed; None where groups are too small."""
    return next((half for half in HALVES if group % half == 0 and columns % (2 * half) == 0), None)


def pack_halves(codes: Tensor, half: int) -> Tensor:
    """[out, in] uint8, less than 16 -> [out, in / 2]"""
    low, high = codes.view(len(codes), -1, 2, half).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_halves(packed: Tensor, half: int) -> Tensor:
    """The inverse of :func:`pack_halves`."""
    parts = packed.view(len(packed), -1, half)
    return torch.stack([parts & 15, parts >> 4], 2).flatten(1)


def weight_only_linear(x: Tensor, weight: Codes, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias``. x: [rows, in], float32, float16 or bfloat16; bias: [out], of the same dtype. -> [rows, out]"""
    if launches(x):
        return weight_only_linear_triton(x, weight, bias)
    return weight_only_linear_reference(x, weight, bias)


def weight_only_linear_reference(x: Tensor, weight: Codes, bias: Tensor | None = None) -> Tensor:
    """:func:`weight_only_linear` in plain PyTorch, a part of the outputs at a time."""
    out = x.new_empty((len(x), weight.shape[0]))
    for start in range(0, weight.shape[0], max(1, CHUNK // weight.shape[1])):
        rows = slice(start, start + max(1, CHUNK // weight.shape[1]))
        codes = unpack_halves(weight.codes[rows], weight.half) if weight.half else weight.codes[rows]
        shift = [None if part is None else part[rows] for part in (weight.zeros, weight.offsets)]
        out[:, rows] = linear(x, dense(codes, weight.scales[rows], *shift).to(x.dtype))
    return out if bias is None else out.add_(bias)


def dense(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """codes: [out, in]; others: [out, groups]. -> [out, in] float32"""
    weight = codes.float().view(len(codes), scales.shape[1], -1)
    if zeros is not None:
        weight.sub_(zeros.float().unsqueeze(2))
    weight.mul_(scales.float().unsqueeze(2))
    if offsets is not None:
        weight.add_(offsets.float().unsqueeze(2))
    return weight.flatten(1)


def weight_only_linear_triton(x: Tensor, weight: Codes, bias: Tensor | None = None) -> Tensor:
    """:func:`weight_only_linear` on a GPU. All contiguous. Groups are multiples of 16 columns, with 4 bits of ``half``.

    Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    columns, step = weight.shape[0], _expect(x, len(x), weight)
    if bias is not None:
        expect("bias", bias, x, (columns,), (x.dtype,))
    out = x.new_empty((len(x), columns))
    few = len(x) <= ROW_TILES[0]
    row_tile, column_tile = (ROW_TILES[0], 32) if few else (ROW_TILES[1], 64 if x.dtype == torch.float32 else 128)
    _launch((-(-len(x) // row_tile), -(-columns // column_tile)), x, weight, out, step, row_tile, column_tile, columns, bias=bias)
    return out


def grouped_weight_only_linear(
    x: Tensor, weight: Codes, experts: Tensor, count: int, blocks: Blocks | None = None, *, by_pair: bool = False
) -> Tensor:
    """Multiply each row with the matrices of its experts, as :func:`kernels.grouped_experts.grouped_linear`. weight: of ``count``
    experts, one below the other."""
    if launches(x):
        return grouped_weight_only_linear_triton(x, weight, experts, count, blocks, by_pair=by_pair)
    return grouped_weight_only_linear_reference(x, weight, experts, count, by_pair=by_pair)


def grouped_weight_only_linear_reference(x: Tensor, weight: Codes, experts: Tensor, count: int, *, by_pair: bool = False) -> Tensor:
    """:func:`grouped_weight_only_linear` in plain PyTorch, expert by expert."""
    columns = weight.shape[0] // count
    out = x.new_full((experts.numel(), columns), float("nan"))
    for expert, pairs in pairs_by_expert(experts, count):
        own = weight.rows(slice(expert * columns, (expert + 1) * columns))
        out[pairs] = weight_only_linear_reference(x[pairs if by_pair else pairs // experts.shape[1]], own)
    return out


def grouped_weight_only_linear_triton(
    x: Tensor, weight: Codes, experts: Tensor, count: int, blocks: Blocks | None = None, *, by_pair: bool = False
) -> Tensor:
    """:func:`grouped_weight_only_linear` on a GPU, as :func:`weight_only_linear_triton`. Experts are not checked."""
    rows, chosen = experts.shape
    columns = weight.shape[0] // count
    step = _expect(x, rows * chosen if by_pair else rows, weight)
    expect("experts", experts, x, (rows, chosen), (torch.int64,))
    blocks = block_pairs(experts, count) if blocks is None else blocks
    out = x.new_empty((rows * chosen, columns))
    column_tile = 64 if x.dtype == torch.float32 else 128
    grid = len(blocks.experts), -(-columns // column_tile)
    chosen = 1 if by_pair else chosen
    _launch(grid, x, weight, out, step, blocks.size, column_tile, columns, blocks=blocks, chosen=chosen, count=count)
    return out


def _expect(x: Tensor, rows: int, weight: Codes) -> int:
    """Check the operands. -> bytes of a row of codes that a step takes"""
    expect_device("x", x)
    expect("x", x, x, (rows, weight.shape[1]), FLOATS)
    dtypes = (torch.uint8,) if weight.half else (torch.int8, torch.uint8, FP8)
    expect("codes", weight.codes, x, weight.codes.shape, dtypes)
    for name, part in (("scales", weight.scales), ("zeros", weight.zeros), ("offsets", weight.offsets)):
        if part is not None:
            expect(name, part, x, weight.scales.shape, (x.dtype,))
    group = weight.group
    step = weight.half or next((step for step in STEPS if group % step == 0), 0)
    if not step or group % step or weight.codes.shape[1] % step:
        raise ValueError(f"groups of {group} columns, where multiples of 16 are expected, with 4 bits of {weight.half}")
    return step


def _launch(
    grid: tuple[int, int],
    x: Tensor,
    weight: Codes,
    out: Tensor,
    step: int,
    row_tile: int,
    column_tile: int,
    columns: int,
    *,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    chosen: int = 1,
    count: int = 1,
) -> None:
    shift = weight.zeros if weight.zeros is not None else weight.offsets
    _weight_only[grid](
        x, weight.codes, weight.scales, shift, bias, out, None if blocks is None else blocks.places,
        None if blocks is None else blocks.experts, len(out), chosen, count, columns, weight.shape[1], weight.group,
        weight.zeros is not None, weight.half > 0, row_tile, column_tile, step,
        num_warps=4, num_stages=4 if row_tile == ROW_TILES[0] else 3,
    )  # fmt: skip


@jit("rows", "chosen")
def _weight_only(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    rows: tl.tensor,
    chosen: tl.tensor,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HALVED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Each program computes ROW_TILE rows and COLUMN_TILE columns. A step multiplies STEP bytes, with 4 bits 2 · STEP columns.

    ``places`` and ``experts``: of blocks (:mod:`kernels.grouped_experts`), whose rows are pairs; None without experts.
    """
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    expert = tl.program_id(1).to(tl.int64) * 0
    if places is not None:
        row = tl.load(places + row)
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    real = row < rows
    if (tl.max(real.to(tl.int32), axis=0) > 0) & (expert < EXPERTS):
        column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        step = tl.arange(0, STEP)
        inside = column < COLUMNS
        bytes_of_row: tl.constexpr = SIZE // 2 if HALVED else SIZE
        groups: tl.constexpr = SIZE // GROUP
        of_weight = expert * COLUMNS + column.to(tl.int64)
        left = x + (row // chosen).to(tl.int64)[:, None] * SIZE + step[None, :]
        right = codes + of_weight[None, :] * bytes_of_row + step[:, None]
        acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
        for start in range(0, bytes_of_row, STEP):
            found = tl.load(right + start, mask=inside[None, :], other=0.0)
            for part in tl.static_range(2 if HALVED else 1):
                first = start * 2 + part * STEP if HALVED else start
                code = found.to(tl.float32)
                if HALVED:
                    code = (found >> 4 if part else found & 15).to(tl.float32)
                place = of_weight * groups + first // GROUP
                scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[None, :]
                if shifts is not None:
                    shift = tl.load(shifts + place, mask=inside, other=0.0).to(tl.float32)[None, :]
                    code = (code - shift) * scale if HAS_ZEROS else code * scale + shift
                else:
                    code = code * scale
                a = tl.load(left + first, mask=real[:, None], other=0.0)
                acc = tl.dot(a, code.to(x.dtype.element_ty), acc, input_precision="ieee")
        if bias is not None:
            acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        cell = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out + cell, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


__all__ = [
    "Codes",
    "dense",
    "grouped_weight_only_linear",
    "grouped_weight_only_linear_reference",
    "grouped_weight_only_linear_triton",
    "half_of",
    "pack_halves",
    "unpack_halves",
    "weight_only_linear",
    "weight_only_linear_reference",
    "weight_only_linear_triton",
]
