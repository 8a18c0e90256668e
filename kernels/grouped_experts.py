"""Products of rows with the experts that a router chose for them, for mixtures of experts.

Pairs of a row and an expert are put in order of the expert, and each expert's pairs are padded to whole blocks, so that every
program multiplies rows of one expert. All tables are made on the device, of sizes that the host knows, so a step never waits and
can be captured in a CUDA graph. Method: Gale et al. 2022, "MegaBlocks", arXiv 2211.15841.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl

ROW_BLOCKS = 16, 64
"""Pairs of a block: of a step with few pairs, and with more than :data:`FEW_PAIRS`."""
FEW_PAIRS = 512
"""With 128 experts, blocks of 64 are mostly padding for some thousand pairs more, but then reading the weights takes the time."""


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


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor, *, by_pair: bool = False) -> Tensor:
    """Multiply each row with the matrices of its experts.

    x: [rows, in], or with ``by_pair`` [rows · chosen, in], a row for each pair; weight: [experts, out, in]; experts: [rows, chosen]
    int64. -> [rows · chosen, out], pair after pair.
    """
    operation = grouped_linear_triton if launches(x, weight) else grouped_linear_reference
    return operation(x, weight, experts, by_pair=by_pair)


def grouped_linear_reference(x: Tensor, weight: Tensor, experts: Tensor, *, by_pair: bool = False) -> Tensor:
    """:func:`grouped_linear` in plain PyTorch, expert by expert."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order if by_pair else order // experts.shape[1])
    counts = torch.bincount(flat, minlength=len(weight)).tolist()
    parts = [linear(part, matrix) for part, matrix in zip(torch.split(rows, counts), weight, strict=True) if len(part)]
    out = x.new_empty((len(flat), weight.shape[1]))
    return out.index_copy_(0, order, torch.cat(parts)) if parts else out


def grouped_linear_triton(x: Tensor, weight: Tensor, experts: Tensor, *, by_pair: bool = False) -> Tensor:
    """:func:`grouped_linear` on a GPU. All contiguous; x and weight of one dtype.

    Raises ValueError for other shapes, dtypes, devices or layouts. Experts are not checked: that would wait for the GPU.
    """
    expect_device("x", x)
    rows, chosen = experts.shape
    count, columns, size = weight.shape
    expect("x", x, x, (rows * chosen if by_pair else rows, size), FLOATS)
    expect("weight", weight, x, (count, columns, size), (x.dtype,))
    expect("experts", experts, x, (rows, chosen), (torch.int64,))
    out = x.new_empty((rows * chosen, columns))
    blocks = block_pairs(experts, count)
    exact = x.dtype == torch.float32
    column_tile, size_tile = (32, 32) if exact else (128, 64)
    grid = (len(blocks.experts), -(-columns // column_tile))
    _grouped_linear[grid](
        x, weight, out, blocks.places, blocks.experts, rows * chosen, 1 if by_pair else chosen,
        columns, size, blocks.size, column_tile, size_tile, num_warps=4 if blocks.size < 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def block_pairs(experts: Tensor, count: int) -> Blocks:
    """Put the pairs of ``experts`` [rows, chosen] in blocks of one of ``count`` experts each. Does not wait for the device."""
    flat, device = experts.flatten(), experts.device
    pairs = len(flat)
    size = ROW_BLOCKS[pairs > FEW_PAIRS]
    blocks = -(-pairs // size) + min(count, pairs)  # the most there can be
    order = flat.argsort(stable=True)
    sizes = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (sizes + size - 1) // size * size
    ends = padded.cumsum(0)
    sorted_experts = flat.index_select(0, order)
    nth = torch.arange(pairs, device=device) - (sizes.cumsum(0) - sizes).index_select(0, sorted_experts)
    places = torch.full((blocks * size,), pairs, dtype=torch.int32, device=device)
    places.index_copy_(0, (ends - padded).index_select(0, sorted_experts) + nth, order.int())
    firsts = torch.arange(0, blocks * size, size, device=device)
    of_block = torch.searchsorted(ends, firsts, right=True).clamp_(max=count - 1)
    return Blocks(places, of_block.int(), size)


@jit("pairs", "chosen")
def _grouped_linear(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    pairs: tl.tensor,
    chosen: tl.tensor,
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
    if tl.max(real.to(tl.int32), axis=0) > 0:
        expert = tl.load(experts + block).to(tl.int64)
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
        cell = place.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out + cell, acc.to(out.dtype.element_ty), mask=real[:, None] & (column < COLUMNS)[None, :])
