"""Low-rank additions to a matrix product: ``y += x · Aᵀ · Bᵀ``, with other matrices for each run of rows.

Two kernels: one shrinks the rows to the ranks of their adapters, one expands them and adds. Each program has a block of rows of one
adapter. Where an adapter's matrices begin, and their rank, is read from a table on the device, so nothing is compiled for them.

Source: Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", arXiv 2310.18547; here a step's rows are in order of their adapters,
so each adapter has one run of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.linear import linear
from kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl

ALIGNMENT = 16
"""Numbers: the matrices of a product begin at multiples of it, and slots are multiples of it apart."""
MOST_PARTS = 3
ROW_BLOCKS = 16, 64
"""Rows of a block: where runs have :data:`FEW_ROWS` or fewer on average, and where they have more."""
FEW_ROWS = 32


class LoraRun(NamedTuple):
    """Rows of one adapter."""

    slot: int
    """Place of the adapter's matrices on the device."""
    begin: int
    """First row, or place of the first row in ``LoraRows.order``."""
    end: int


class LoraRows(NamedTuple):
    """The rows of a product that have an adapter, run after run."""

    runs: tuple[LoraRun, ...]
    blocks: Tensor
    """[3 · blocks] int64, on the device: slot, first row and end of each block of a run, from :func:`block_runs`. A block of zeros
    does nothing, so that tables of fixed size can be padded."""
    size: int
    """Most rows of a block; one of :data:`ROW_BLOCKS`."""
    order: Tensor | None = None
    """[rows] int64, on the device: the rows of all runs; None: runs are rows as they are."""
    most_rank: int | None = None
    """The largest rank of a captured launch, which is replayed with other ``blocks``; None otherwise. ``runs`` is not read then."""


class LoraMatrices(NamedTuple):
    """Matrices of one adapter for one product."""

    a: Tensor
    """[parts · rank, inputs]"""
    b: tuple[tuple[int, int, Tensor], ...]
    """Parts of the output: first column, end, and [columns, rank]."""
    rank: int


class LoraProduct(NamedTuple):
    """The additions of the adapters on the device to one product."""

    matrices: Sequence[LoraMatrices | None]
    """[slot], None where the adapter leaves this product alone. Views of ``weights``."""
    weights: Tensor
    """[slots, numbers]. A product's matrix A, [parts · rank, inputs], is followed by its matrix B, [outputs, rank]."""
    table: Tensor
    """[slots, 2, products] int64, on the device: where the matrices of each product begin in their slot, and their rank or 0."""
    number: int
    """Number of the product in ``table``."""
    inputs: int
    parts: tuple[int, ...]
    """Columns of each part of the output."""


def block_runs(runs: Sequence[LoraRun], size: int | None = None) -> tuple[npt.NDArray[np.int64], int]:
    """Cut ``runs`` into blocks: :attr:`LoraRows.blocks` on the host as [blocks, 3], and :attr:`LoraRows.size`.

    ``size``: of the blocks; None for the one that suits the runs.
    """
    count = sum(run.end - run.begin for run in runs)
    size = size or ROW_BLOCKS[count > FEW_ROWS * len(runs)]
    blocks = [(run.slot, first, min(first + size, run.end)) for run in runs for first in range(run.begin, run.end, size)]
    return np.array(blocks, np.int64).reshape(-1, 3), size


def most_blocks(rows: int, runs: int, size: int) -> int:
    """Upper bound of the blocks of ``size`` rows into which ``rows`` rows of at most ``runs`` runs are cut."""
    return rows // size + min(rows, runs)


def add_lora(y: Tensor, x: Tensor, product: LoraProduct, rows: LoraRows) -> Tensor:
    """Add each run's product with the matrices of its slot to ``y``, in place; return it. x: [rows, inputs]; y: [rows, outputs]."""
    operation = add_lora_triton if launches(y, x, product.weights) else add_lora_reference
    return operation(y, x, product, rows)


def add_lora_reference(y: Tensor, x: Tensor, product: LoraProduct, rows: LoraRows) -> Tensor:
    """:func:`add_lora` in plain PyTorch, run by run."""
    for run in rows.runs:
        found = product.matrices[run.slot]
        if found is None:
            continue
        if rows.order is None:
            _add(y[run.begin : run.end], x[run.begin : run.end], found)
        else:
            picked = rows.order[run.begin : run.end]
            added = y.index_select(0, picked)
            _add(added, x.index_select(0, picked), found)
            y.index_copy_(0, picked, added)
    return y


def _add(y: Tensor, x: Tensor, matrices: LoraMatrices) -> None:
    """Shrink ``x`` to the ranks of all parts in one product, and expand each part onto its columns of ``y``."""
    inner = linear(x, matrices.a)
    for part, (begin, end, b) in enumerate(matrices.b):
        y[:, begin:end].addmm_(inner[:, part * matrices.rank : (part + 1) * matrices.rank], b.t())


def add_lora_triton(y: Tensor, x: Tensor, product: LoraProduct, rows: LoraRows) -> Tensor:
    """:func:`add_lora` on a GPU, in two launches. All contiguous and of one dtype; the products between are rounded to it.

    Raises ValueError for other shapes, dtypes, devices or layouts. The tables are not checked: that would wait for the GPU.
    """
    _check(y, x, product, rows)
    rank, count = _extent(product, rows, len(x))
    if rank == 0:
        return y
    parts, (_, _, products) = len(product.parts), product.table.shape
    width, blocks = parts * rank, len(rows.blocks) // 3
    inner = x.new_empty((count, width))
    ordered = rows.order is not None
    order = rows.blocks if rows.order is None else rows.order
    exact = x.dtype == torch.float32
    column_tile, size_tile = (32, 32) if exact else (64, 128 if rows.size == ROW_BLOCKS[0] else 64)
    _shrink[blocks, -(-width // column_tile)](
        x, inner, product.weights, product.table, rows.blocks, order, int(ordered), product.number, products,
        product.weights.shape[1], width, product.inputs, parts, rows.size, column_tile, size_tile, num_warps=4, num_stages=3,
    )  # fmt: skip
    column_tile = 32 if exact else 128
    columns = (*product.parts, *[0] * (MOST_PARTS - parts))
    tiles = sum(-(-part // column_tile) for part in product.parts)
    _expand[blocks, tiles](
        y, inner, product.weights, product.table, rows.blocks, order, int(ordered), product.number, products,
        product.weights.shape[1], width, product.inputs, parts, *columns, rows.size, column_tile, 16, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def _extent(product: LoraProduct, rows: LoraRows, count: int) -> tuple[int, int]:
    """Largest rank of the runs, and the number of places that they reach. ``count``: rows of the product."""
    if rows.most_rank is not None:
        return rows.most_rank, count
    rank = max((found.rank for run in rows.runs if (found := product.matrices[run.slot]) is not None), default=0)
    return rank, max((run.end for run in rows.runs), default=0)


def _check(y: Tensor, x: Tensor, product: LoraProduct, rows: LoraRows) -> None:
    expect_device("x", x)
    if len(product.parts) > MOST_PARTS:
        raise ValueError(f"parts has {len(product.parts)} entries, where at most {MOST_PARTS} are expected")
    if product.weights.shape[1] % ALIGNMENT:
        raise ValueError(f"weights has slots of {product.weights.shape[1]} numbers, where a multiple of {ALIGNMENT} is expected")
    expect("x", x, x, (len(y), product.inputs), FLOATS)
    expect("y", y, x, (len(y), sum(product.parts)), (x.dtype,))
    expect("weights", product.weights, x, product.weights.shape, (x.dtype,))
    expect("table", product.table, x, (len(product.weights), 2, product.table.shape[2]), (torch.int64,))
    expect("blocks", rows.blocks, x, rows.blocks.shape, (torch.int64,))
    if rows.order is not None:
        expect("order", rows.order, x, rows.order.shape, (torch.int64,))


@jit("blocks", "order", "ordered", "product", "products", "capacity", "width")
def _shrink(
    x: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    product: tl.tensor,
    products: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    """COLUMN_TILE of the parts' ranks of one block a program. inner: [places, width]"""
    block = blocks + 3 * tl.program_id(0)
    slot, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    matrix, rank = _entry(table, slot, product, products)
    columns = PARTS * rank
    if (first < end) & (tl.program_id(1) * COLUMN_TILE < columns):
        place = first + tl.arange(0, ROW_TILE)
        real = place < end
        row = tl.load(order + place, mask=real & (ordered != 0), other=place)
        column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        step = tl.arange(0, SIZE_TILE)
        left = x + row[:, None] * INPUTS + step[None, :]
        right = weights + tl.multiple_of(slot * capacity + matrix, 16) + column[None, :] * INPUTS + step[:, None]
        acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
        for start in range(0, INPUTS, SIZE_TILE):
            inside = step < INPUTS - start
            a = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=(column < columns)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        cell = place[:, None] * width + column[None, :]
        tl.store(inner + cell, acc.to(inner.dtype.element_ty), mask=real[:, None] & (column < columns)[None, :])


@jit("blocks", "order", "ordered", "product", "products", "capacity", "width")
def _expand(
    y: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    product: tl.tensor,
    products: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
) -> None:
    """COLUMN_TILE columns of one part and one block a program. FIRST, SECOND, THIRD: columns of the parts."""
    block = blocks + 3 * tl.program_id(0)
    slot, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    matrix, rank = _entry(table, slot, product, products)
    if (first < end) & (rank > 0):
        tile = tl.program_id(1)
        first_tiles: tl.constexpr = (FIRST + COLUMN_TILE - 1) // COLUMN_TILE
        tiles: tl.constexpr = first_tiles + (SECOND + COLUMN_TILE - 1) // COLUMN_TILE
        part = (tile >= first_tiles).to(tl.int32) + (tile >= tiles).to(tl.int32)
        own = (tile - tl.where(part == 0, 0, tl.where(part == 1, first_tiles, tiles))) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        kept = own < tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, THIRD))
        column = tl.where(part == 0, 0, tl.where(part == 1, FIRST, FIRST + SECOND)) + own
        place = first + tl.arange(0, ROW_TILE)
        real = place < end
        step = tl.arange(0, RANK_TILE)
        left = inner + place[:, None] * width + part * rank + step[None, :]
        right = weights + slot * capacity + matrix + PARTS * rank * INPUTS + column[None, :] * rank + step[:, None]
        acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
        for start in range(0, rank, RANK_TILE):
            inside = step < rank - start
            a = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=kept[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        row = tl.load(order + place, mask=real & (ordered != 0), other=place)
        cell = y + row[:, None] * (FIRST + SECOND + THIRD) + column[None, :]
        mask = real[:, None] & kept[None, :]
        added = tl.load(cell, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(cell, added.to(y.dtype.element_ty), mask=mask)


@jit()
def _entry(table: tl.tensor, slot: tl.tensor, product: tl.tensor, products: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First number and rank, int32, of a product's matrices in a slot."""
    entry = table + slot * 2 * products + product
    return tl.load(entry), tl.load(entry + products).to(tl.int32)
