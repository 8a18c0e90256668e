"""Products with weights in codes of 4 or 8 bits, whose groups of columns have scales; activations stay as they are.

A weight is ``(codes - zeros) · scales + offsets``; two codes of 4 bits share a byte. On a GPU, each program makes a tile of the
weight dense and multiplies with it, so the memory is read in the codes' size. On a CPU in bfloat16, torch's own operator
multiplies a few rows with codes of 4 bits; more rows, and other codes, are multiplied with a part of the weight that is made dense
for it, which takes longer than a dense weight does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl

HALVES = 64, 32
"""Columns whose codes of 4 bits are the low halves of successive bytes; the high halves are those of as many columns after them."""
CHUNK = 1 << 20
"""Elements of a weight that are made dense at a time on a CPU."""
FEW_ROWS = 48
"""Rows up to which torch's operator for 4 bits on a CPU is faster than a dense part: [2048, 2048] on one core of a Xeon with AMX
takes 0.35 ms of CPU time for one row, 2.3 for 16 and 8.8 for 64, and making it dense 7.2 (dense weights: 0.95, 0.90 and 1.4)."""
CPU_GROUPS = 32, 64, 128, 256
"""Group sizes that the operator takes."""
CPU_COLUMNS = 64
"""Outputs that its layout has side by side, with AVX-512."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in] of codes."""

    codes: Tensor
    """8 bits: [out, in] int8 or uint8. 4 bits: [out, in / 2] uint8, see :data:`HALVES`."""
    scales: Tensor
    """[out, groups], in the dtype of the activations, like the others"""
    zeros: Tensor | None = None
    """Codes that stand for 0, whole numbers."""
    offsets: Tensor | None = None
    """Added to what codes and scales make; not beside ``zeros``."""
    half: int = 0
    """One of :data:`HALVES`; 0: 8 bits."""

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
    expect_device("x", x)
    rows, (columns, size) = len(x), weight.shape
    expect("x", x, x, (rows, size), FLOATS)
    expect("codes", weight.codes, x, weight.codes.shape, (torch.uint8,) if weight.half else (torch.int8, torch.uint8))
    for name, part in (("scales", weight.scales), ("zeros", weight.zeros), ("offsets", weight.offsets)):
        if part is not None:
            expect(name, part, x, (columns, weight.scales.shape[1]), (x.dtype,))
    if bias is not None:
        expect("bias", bias, x, (columns,), (x.dtype,))
    group, shift = weight.group, weight.zeros if weight.zeros is not None else weight.offsets
    step = weight.half or next((step for step in (64, 32, 16) if group % step == 0), 0)
    if not step or group % step or size % (2 * step if weight.half else step):
        raise ValueError(f"groups of {group} columns, where multiples of 16 are expected, with 4 bits of {weight.half}")
    out = x.new_empty((rows, columns))
    few = rows <= 16
    row_tile, column_tile = (16, 32) if few else (64, 64) if x.dtype == torch.float32 else (64, 128)
    grid = (-(-rows // row_tile), -(-columns // column_tile))
    _weight_only[grid](
        x, weight.codes, weight.scales, weight.scales if shift is None else shift, x if bias is None else bias, out,
        rows, columns, size, group, bias is not None, weight.zeros is not None, weight.offsets is not None, weight.half > 0,
        row_tile, column_tile, step, num_warps=4, num_stages=4 if few else 3,
    )  # fmt: skip
    return out


@jit("rows")
def _weight_only(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HALVED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Each program computes ROW_TILE rows and COLUMN_TILE columns. A step multiplies STEP bytes, with 4 bits 2 · STEP columns."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    step = tl.arange(0, STEP)
    inside, real = column < COLUMNS, (row < rows)[:, None]
    bytes_of_row: tl.constexpr = SIZE // 2 if HALVED else SIZE
    left = x + row.to(tl.int64)[:, None] * SIZE + step[None, :]
    right = codes + column.to(tl.int64)[None, :] * bytes_of_row + step[:, None]
    groups: tl.constexpr = SIZE // GROUP
    at = column * groups
    acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, bytes_of_row, STEP):
        found = tl.load(right + start, mask=inside[None, :], other=0)
        for part in tl.static_range(2 if HALVED else 1):
            first = start * 2 + part * STEP if HALVED else start
            code = found.to(tl.float32)
            if HALVED:
                code = (found >> 4 if part else found & 15).to(tl.float32)
            place = at + first // GROUP
            scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[None, :]
            if HAS_ZEROS:
                code -= tl.load(shifts + place, mask=inside, other=0.0).to(tl.float32)[None, :]
            code *= scale
            if HAS_OFFSETS:
                code += tl.load(shifts + place, mask=inside, other=0.0).to(tl.float32)[None, :]
            a = tl.load(left + first, mask=real, other=0.0)
            acc = tl.dot(a, code.to(x.dtype.element_ty), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    cell = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=real & inside[None, :])


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight of 4 bits in the layout of torch's operator for CPUs."""

    layout: Tensor
    """[out, in / 2] uint8, opaque"""
    scales: Tensor
    """[groups, out, 2] bfloat16: scales, and what a code of 8 stands for"""
    group: int


@functools.cache
def has_operator() -> bool:
    """Whether this processor has torch's operator for 4 bits in a form that is fast and whose layout is the known one."""
    if not torch.cpu.get_capabilities().get("avx512_f"):
        return False
    codes = torch.arange(2 * CPU_COLUMNS * 32).view(2 * CPU_COLUMNS, 32).mul(7) % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return torch.equal(_unpack_layout(packed), codes.to(torch.uint8))


def packs_for_cpu(out: int, columns: int, group: int, dtype: torch.dtype) -> bool:
    """Whether :func:`pack_for_cpu` takes such a weight here."""
    fits = out % CPU_COLUMNS == 0 and group in CPU_GROUPS and columns % group == 0
    return fits and dtype == torch.bfloat16 and has_operator()


def pack_for_cpu(codes: Tensor, scales: Tensor, zeros: Tensor | None, offsets: Tensor | None) -> PackedCodes:
    """codes: [out, in] uint8, less than 16; the others: [out, groups] float32."""
    layout = torch.empty(len(codes), codes.shape[1] // 2, dtype=torch.uint8)
    for rows in _spans(layout):  # the operator wants integers of 32 bits
        layout[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes[rows].int(), 1)
    middle = (8.0 if zeros is None else 8.0 - zeros) * scales
    middle = middle if offsets is None else middle + offsets
    both = torch.stack([scales, middle], 2).transpose(0, 1).to(torch.bfloat16)
    return PackedCodes(layout, both.contiguous(), codes.shape[1] // scales.shape[1])


def packed_codes_linear(x: Tensor, weight: PackedCodes, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias``. x: [rows, in] bfloat16. -> [rows, out]"""
    if len(x) <= FEW_ROWS:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.layout, weight.group, weight.scales)
        return out if bias is None else out.add_(bias)
    out = x.new_empty((len(x), len(weight.layout)))
    for rows in _spans(weight.layout):
        scales, middle = weight.scales[:, rows].unbind(2)
        codes = _unpack_layout(weight.layout[rows]).to(torch.int8).sub_(8)
        out[:, rows] = linear(x, dense(codes, scales.t(), None, middle.t()).to(x.dtype))
    return out if bias is None else out.add_(bias)


def _spans(layout: Tensor) -> Iterator[slice]:
    """Outputs, whole blocks of a layout at a time."""
    step = max(1, CHUNK // (2 * layout.shape[1]) // CPU_COLUMNS) * CPU_COLUMNS
    return (slice(start, start + step) for start in range(0, len(layout), step))


def _unpack_layout(packed: Tensor) -> Tensor:
    """[out, in] uint8. The layout has 64 outputs side by side for each input: bytes 0 to 15 have outputs 0 to 15 and, in their high
    halves, 32 to 47; bytes 16 to 31 have 16 to 31 and 48 to 63 (ATen, ``native/cpu/int4mm_kernel.cpp``)."""
    parts = packed.view(len(packed) // CPU_COLUMNS, -1, CPU_COLUMNS // 2)
    return torch.cat([parts & 15, parts >> 4], 2).transpose(1, 2).reshape(len(packed), -1)


__all__ = [
    "Codes",
    "PackedCodes",
    "dense",
    "half_of",
    "pack_for_cpu",
    "pack_halves",
    "packed_codes_linear",
    "packs_for_cpu",
    "unpack_halves",
    "weight_only_linear",
    "weight_only_linear_reference",
    "weight_only_linear_triton",
]
