"""Products of rows with the experts that a router chose for them, for mixtures of experts: in the model's dtype, and in FP8.

Pairs of a row and an expert are put in order of the expert, and each expert's pairs are padded to whole blocks, so that every
program multiplies rows of one expert. The tables are made on the device, in three launches and once for all products of a layer.
The host knows their sizes, so a step never waits and can be captured in a CUDA graph. Method: Gale et al. 2022, "MegaBlocks",
arXiv 2211.15841.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.quantize import FP8, scaled_linear_reference
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl

ROW_BLOCKS = 16, 64
"""Pairs of a block: of a step with few pairs, and with more than :data:`FEW_PAIRS`."""
FEW_PAIRS = 512
"""With 128 experts, blocks of 64 are mostly padding for some thousand pairs more, but then reading the weights takes the time."""
PAIRS = 512
"""Pairs of a program that makes the tables."""


Operand = tuple[Tensor, Tensor]
"""Codes of e4m3 and float32 scales, one for each row: [..., rows, size] and [..., rows, 1] (:mod:`kernels.quantize`)."""


class Blocks(NamedTuple):
    """Pairs in order of their experts. Pair i is row ``i // chosen`` and the ``i % chosen``-th expert of that row."""

    places: Tensor
    """[blocks · size] int32: pairs, and ``pairs`` for padding, of which each expert's last block has its own."""
    experts: Tensor
    """[blocks] int32"""
    size: int
    """Pairs of a block."""


def route(logits: Tensor, chosen: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the most probable experts of each row.

    logits: [rows, experts] -> experts [rows, chosen] int64, and their probabilities [rows, chosen] in float32, which add up to 1 if
    ``renormalise``.
    """
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(chosen, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor, blocks: Blocks | None = None, *, by_pair: bool = False) -> Tensor:
    """Multiply each row with the matrices of its experts.

    x: [rows, in], or with ``by_pair`` [rows · chosen, in], a row for each pair; weight: [experts, out, in]; experts: [rows, chosen]
    int64, of which the number of experts stands for one that is not here. -> [rows · chosen, out], pair after pair, undefined for
    experts that are not here. blocks: of these experts, from :func:`block_pairs`; made here where None.
    """
    if launches(x, weight):
        return grouped_linear_triton(x, weight, experts, blocks, by_pair=by_pair)
    return grouped_linear_reference(x, weight, experts, by_pair=by_pair)


def grouped_linear_reference(x: Tensor, weight: Tensor, experts: Tensor, *, by_pair: bool = False) -> Tensor:
    """:func:`grouped_linear` in plain PyTorch, expert by expert."""
    out = x.new_full((experts.numel(), weight.shape[1]), float("nan"))
    for expert, pairs in pairs_by_expert(experts, len(weight)):
        out[pairs] = linear(x[pairs if by_pair else pairs // experts.shape[1]], weight[expert])
    return out


def grouped_scaled_linear(
    x: Operand, weight: Operand, experts: Tensor, dtype: torch.dtype, blocks: Blocks | None = None, *, by_pair: bool = False
) -> Tensor:
    """Multiply each row with the matrices of its experts, in FP8, with a scale for each row and each output channel.

    x: [rows, in], or with ``by_pair`` [rows · chosen, in]; weight: [experts, out, in]; experts: as in :func:`grouped_linear`.
    -> [rows · chosen, out] in ``dtype``, as there. Sums are those of :func:`kernels.quantize.scaled_linear`.
    """
    if launches(x[0], weight[0]):
        return grouped_scaled_linear_triton(x, weight, experts, dtype, blocks, by_pair=by_pair)
    return grouped_scaled_linear_reference(x, weight, experts, dtype, by_pair=by_pair)


def grouped_scaled_linear_reference(
    x: Operand, weight: Operand, experts: Tensor, dtype: torch.dtype, *, by_pair: bool = False
) -> Tensor:
    """:func:`grouped_scaled_linear` in plain PyTorch, expert by expert."""
    out = x[1].new_full((experts.numel(), weight[0].shape[1]), float("nan"), dtype=dtype)
    for expert, pairs in pairs_by_expert(experts, len(weight[0])):
        rows = pairs if by_pair else pairs // experts.shape[1]
        out[pairs] = scaled_linear_reference(x[0][rows], x[1][rows], weight[0][expert], weight[1][expert], dtype=dtype)
    return out


def pairs_by_expert(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Each of ``count`` experts that has pairs, and these."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=count + 1).tolist()
    found = torch.split(flat.argsort(stable=True), counts)[:count]
    return ((expert, pairs) for expert, pairs in enumerate(found) if len(pairs))


def grouped_linear_triton(
    x: Tensor, weight: Tensor, experts: Tensor, blocks: Blocks | None = None, *, by_pair: bool = False
) -> Tensor:
    """:func:`grouped_linear` on a GPU. All contiguous; x and weight of one dtype.

    Raises ValueError for other shapes, dtypes, devices or layouts. Experts are not checked: that would wait for the GPU.
    """
    expect_device("x", x)
    rows, chosen = experts.shape
    count, columns, size = weight.shape
    expect("x", x, x, (rows * chosen if by_pair else rows, size), FLOATS)
    expect("weight", weight, x, (count, columns, size), (x.dtype,))
    expect("experts", experts, x, (rows, chosen), (torch.int64,))
    return _launch(x, weight, experts, blocks, x.dtype, by_pair=by_pair)


def grouped_scaled_linear_triton(
    x: Operand, weight: Operand, experts: Tensor, dtype: torch.dtype, blocks: Blocks | None = None, *, by_pair: bool = False
) -> Tensor:
    """:func:`grouped_scaled_linear` on a GPU that multiplies e4m3. All contiguous.

    Raises ValueError for other shapes, dtypes, devices or layouts. Experts are not checked: that would wait for the GPU.
    """
    codes, scales = x
    expect_device("x", codes)
    rows, chosen = experts.shape
    count, columns, size = weight[0].shape
    given = rows * chosen if by_pair else rows
    expect("x", codes, codes, (given, size), (FP8,))
    expect("scales of x", scales, codes, (given, 1), (torch.float32,))
    expect("weight", weight[0], codes, (count, columns, size), (FP8,))
    expect("scales of weight", weight[1], codes, (count, columns, 1), (torch.float32,))
    expect("experts", experts, codes, (rows, chosen), (torch.int64,))
    return _launch(codes, weight[0], experts, blocks, dtype, scales, weight[1], by_pair=by_pair)


def _launch(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    blocks: Blocks | None,
    dtype: torch.dtype,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    *,
    by_pair: bool,
) -> Tensor:
    (rows, chosen), (count, columns, size) = experts.shape, weight.shape
    out = x.new_empty((rows * chosen, columns), dtype=dtype)
    blocks = block_pairs(experts, count) if blocks is None else blocks
    column_tile, size_tile = (32, 32) if x.dtype == torch.float32 else (128, 128 // x.element_size())
    grid = (len(blocks.experts), -(-columns // column_tile))
    _grouped_linear[grid](
        x, weight, x_scales, weight_scales, out, blocks.places, blocks.experts, rows * chosen, 1 if by_pair else chosen,
        count, columns, size, blocks.size, column_tile, size_tile, num_warps=4 if blocks.size < 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def block_pairs(experts: Tensor, count: int) -> Blocks:
    """Put the pairs of ``experts`` [rows, chosen] in blocks of one expert each, on a GPU and without waiting for it.

    Pairs of the expert ``count``, which is not here, come last, in blocks of their own. Pairs of an expert have any order: a row's
    product does not depend on the rows beside it.
    """
    pairs, device = experts.numel(), experts.device
    size = ROW_BLOCKS[pairs > FEW_PAIRS]
    blocks = -(-pairs // size) + min(count + 1, pairs)  # the most there can be
    sizes = torch.zeros(count + 1, dtype=torch.int32, device=device)
    ranks, places, of_block = (torch.empty(length, dtype=torch.int32, device=device) for length in (pairs, blocks * size, blocks))
    _rank_pairs[(-(-pairs // PAIRS),)](experts, sizes, ranks, pairs, PAIRS, num_warps=4)
    _place_pairs[(-(-blocks * size // PAIRS),)](
        experts, sizes, ranks, places, of_block, pairs, blocks, count, power_of_two(count + 1), size, PAIRS, num_warps=8
    )
    return Blocks(places, of_block, size)


@jit("pairs")
def _rank_pairs(experts: tl.tensor, sizes: tl.tensor, ranks: tl.tensor, pairs: tl.tensor, PAIRS: tl.constexpr) -> None:
    """Count the pairs of each expert, and number them."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    expert = tl.load(experts + pair, mask=real, other=0)
    tl.store(ranks + pair, tl.atomic_add(sizes + expert, 1, mask=real, sem="relaxed"), mask=real)


@jit("pairs", "blocks")
def _place_pairs(
    experts: tl.tensor,
    sizes: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    of_block: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    COUNT: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Each program stores the places of PAIRS pairs, and the experts and the padding of as many places."""
    expert = tl.arange(0, EXPERT_BLOCK)
    here = tl.load(sizes + expert, mask=expert <= COUNT, other=0)
    padded = (here + SIZE - 1) // SIZE * SIZE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded

    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    own = tl.load(experts + pair, mask=real, other=0).to(tl.int32)
    tl.store(places + tl.gather(starts, own, 0) + tl.load(ranks + pair, mask=real, other=0), pair, mask=real)

    block = tl.program_id(0) * (PAIRS // SIZE) + tl.arange(0, PAIRS // SIZE)
    first = (block * SIZE)[:, None]
    owns = (starts[None, :] <= first) & (first < ends[None, :])
    of_expert = tl.sum(tl.where(owns, expert[None, :], 0), axis=1)
    of_expert = tl.where(block * SIZE < tl.sum(padded, axis=0), of_expert, COUNT)
    tl.store(of_block + block, of_expert, mask=block < blocks)
    left = tl.sum(tl.where(owns, here[None, :] + starts[None, :] - first, 0), axis=1)
    nth = tl.arange(0, SIZE)[None, :]
    padding = (block < blocks)[:, None] & (nth >= left[:, None])
    tl.store(places + first + nth, tl.zeros([PAIRS // SIZE, SIZE], tl.int32) + pairs, mask=padding)


@jit("pairs", "chosen")
def _grouped_linear(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    pairs: tl.tensor,
    chosen: tl.tensor,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    """Each program computes COLUMN_TILE columns of one block. ``chosen``: pairs that share a row of ``x``."""
    block = tl.program_id(0)
    place = tl.load(places + block * ROW_TILE + tl.arange(0, ROW_TILE))
    real = place < pairs
    expert = tl.load(experts + block).to(tl.int64)
    if (tl.max(real.to(tl.int32), axis=0) > 0) & (expert < EXPERTS):
        column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        step = tl.arange(0, SIZE_TILE)
        left = x + (place // chosen).to(tl.int64)[:, None] * SIZE + step[None, :]
        right = weight + (expert * COLUMNS + column.to(tl.int64))[None, :] * SIZE + step[:, None]
        acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
        for start in range(0, SIZE, SIZE_TILE):
            inside = step < SIZE - start
            a = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=(column < COLUMNS)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if x_scales is not None:
            row_scales = tl.load(x_scales + place // chosen, mask=real, other=0.0)
            column_scales = tl.load(weight_scales + expert * COLUMNS + column, mask=column < COLUMNS, other=0.0)
            acc = acc * row_scales[:, None] * column_scales[None, :]
        cell = place.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out + cell, acc.to(out.dtype.element_ty), mask=real[:, None] & (column < COLUMNS)[None, :])
