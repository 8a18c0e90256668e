"""Low-rank additions to a matrix product: ``y += x · Aᵀ · Bᵀ``, with other matrices for each run of rows.

Two operations: one shrinks the rows to the ranks of their adapters, one expands them and adds. Where an element-wise operation
reads the product next, that operation expands and adds (:mod:`kernels.lora_gate`, :mod:`kernels.lora_rope`), which saves reading
and writing the product once. Each program has a block of rows of one adapter. Where an adapter's matrices begin, and their rank, is
read from a table on the device, so nothing is compiled for them.

Source: Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", arXiv 2310.18547; here a step's rows are in order of their adapters,
so each adapter has one run of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.lora_layout import ALIGNMENT, MOST_PARTS, RANK_ALIGNMENT, ROW_BLOCKS, LoraDelta, LoraProduct, LoraRows
from yardstick_llm.kernels.lora_tiles import RANK_TILE, UNIT, entry
from yardstick_llm.kernels.quantize import FP8
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl


def add_lora(y: Tensor, x: Tensor, product: LoraProduct, rows: LoraRows) -> Tensor:
    """Add each run's product with the matrices of its slot to ``y``, in place; return it. x: [rows, inputs]; y: [rows, outputs]."""
    delta = shrink_lora(x, product, rows)
    return y if delta is None else expand_lora(y, delta)


def shrink_lora(x: Tensor, product: LoraProduct, rows: LoraRows, scales: Tensor | None = None) -> LoraDelta | None:
    """Multiply each run with the matrix A of its slot. x: [rows, inputs]. None where no adapter of the rows changes the product.

    scales: [rows, 1] float32, where x are e4m3 codes (:mod:`kernels.quantize`); None where x is in the dtype of the matrices.
    """
    operation = shrink_lora_triton if launches(x, product.weights) else shrink_lora_reference
    return operation(x, product, rows, scales)


def expand_lora(y: Tensor, delta: LoraDelta) -> Tensor:
    """Multiply each run with the matrix B of its slot and add it to ``y``, in place; return it. y: [rows, outputs]."""
    return expand_lora_triton(y, delta) if launches(y, delta.inner) else expand_lora_reference(y, delta)


def shrink_lora_reference(x: Tensor, product: LoraProduct, rows: LoraRows, scales: Tensor | None = None) -> LoraDelta | None:
    """:func:`shrink_lora` in plain PyTorch, run by run, all parts in one product."""
    width = len(product.parts) * _most_rank(product, rows)
    if width == 0:
        return None
    inner = product.weights.new_empty((len(x), width))
    for run in rows.runs:
        found = product.matrices[run.slot]
        if found is not None:
            own = slice(run.begin, run.end) if rows.order is None else rows.order[run.begin : run.end]
            values = x[own] if scales is None else (x[own].float() * scales[own]).to(found.a.dtype)
            inner[run.begin : run.end, : len(found.a)] = linear(values, found.a)
    return LoraDelta(inner, product, rows)


def expand_lora_reference(y: Tensor, delta: LoraDelta) -> Tensor:
    """:func:`expand_lora` in plain PyTorch, run by run, each part onto its columns of ``y``."""
    for run in delta.rows.runs:
        found = delta.product.matrices[run.slot]
        if found is None:
            continue
        picked = None if delta.rows.order is None else delta.rows.order[run.begin : run.end]
        own = y[run.begin : run.end] if picked is None else y.index_select(0, picked)
        for part, (begin, end, b) in enumerate(found.b):
            own[:, begin:end].addmm_(delta.inner[run.begin : run.end, part * found.rank : (part + 1) * found.rank], b.t())
        if picked is not None:
            y.index_copy_(0, picked, own)
    return y


def shrink_lora_triton(x: Tensor, product: LoraProduct, rows: LoraRows, scales: Tensor | None = None) -> LoraDelta | None:
    """:func:`shrink_lora` on a GPU, rounded to the matrices' dtype. All contiguous and of one dtype, but for codes and scales.

    Raises ValueError for other shapes, dtypes, devices or layouts. The tables are not checked: that would wait for the GPU.
    """
    expect_device("x", x)
    weights = product.weights
    expect("weights", weights, x, weights.shape, FLOATS)
    expect("x", x, x, (len(x), product.inputs), (weights.dtype if scales is None else FP8,))
    if scales is not None:
        expect("scales", scales, x, (len(x), 1), (torch.float32,))
    _check(weights, product, rows)
    rank = _most_rank(product, rows)
    if rank == 0:
        return None
    if rank % RANK_ALIGNMENT:
        raise ValueError(f"the largest rank is {rank}, where a multiple of {RANK_ALIGNMENT} is expected")
    width = len(product.parts) * rank
    inner = weights.new_empty((len(x), width))
    delta = LoraDelta(inner, product, rows)
    exact = weights.dtype == torch.float32
    column_tile, size_tile = (32, 32) if exact else (64, 128 if rows.size == ROW_BLOCKS[0] else 64)
    _shrink[len(rows.blocks) // 3, -(-width // column_tile)](
        x, scales, *tables(delta), *orders(rows), product.inputs, len(product.parts), rows.size, column_tile, size_tile,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return delta


def expand_lora_triton(y: Tensor, delta: LoraDelta) -> Tensor:
    """:func:`expand_lora` on a GPU. All contiguous and of one dtype. Raises ValueError as :func:`shrink_lora_triton` does."""
    check_delta(delta, y)
    _, product, rows = delta
    expect("y", y, y, (len(delta.inner), sum(product.parts)), FLOATS)
    parts = len(product.parts)
    column_tile = 32 if y.dtype == torch.float32 else 128
    columns = (*product.parts, *[0] * (MOST_PARTS - parts))
    tiles = sum(-(-part // column_tile) for part in product.parts)
    _expand[len(rows.blocks) // 3, tiles](
        y, *tables(delta), *orders(rows), product.inputs, parts, *columns, rows.size, column_tile, RANK_TILE,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def tables(delta: LoraDelta) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, int]:
    """Arguments of all kernels: inner, weights, table, blocks, product, products, capacity, width in units of the alignment."""
    inner, product, rows = delta
    products, capacity, width = product.table.shape[2], product.weights.shape[1], inner.shape[1] // RANK_ALIGNMENT
    return inner, product.weights, product.table, rows.blocks, product.number, products, capacity, width


def orders(rows: LoraRows) -> tuple[Tensor, int]:
    """Arguments of kernels that may have another order: order, ordered."""
    return (rows.blocks, 0) if rows.order is None else (rows.order, 1)


def check_delta(delta: LoraDelta, like: Tensor) -> None:
    """Check the arguments of a kernel that adds ``delta`` to ``like``. Raises ValueError."""
    expect_device("inner", delta.inner)
    expect("inner", delta.inner, like, delta.inner.shape, (like.dtype,))
    _check(like, delta.product, delta.rows)


def _most_rank(product: LoraProduct, rows: LoraRows) -> int:
    if rows.most_rank is not None:
        return rows.most_rank
    return max((found.rank for run in rows.runs if (found := product.matrices[run.slot]) is not None), default=0)


def _check(like: Tensor, product: LoraProduct, rows: LoraRows) -> None:
    if len(product.parts) > MOST_PARTS:
        raise ValueError(f"parts has {len(product.parts)} entries, where at most {MOST_PARTS} are expected")
    if product.weights.shape[1] % ALIGNMENT:
        raise ValueError(f"weights has slots of {product.weights.shape[1]} numbers, where a multiple of {ALIGNMENT} is expected")
    expect("weights", product.weights, like, product.weights.shape, (like.dtype,))
    expect("table", product.table, like, (len(product.weights), 2, product.table.shape[2]), (torch.int64,))
    expect("blocks", rows.blocks, like, rows.blocks.shape, (torch.int64,))
    if rows.order is not None:
        expect("order", rows.order, like, rows.order.shape, (torch.int64,))


@jit("blocks", "product", "products", "capacity", "width", "order", "ordered")
def _shrink(
    x: tl.tensor,
    scales: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    product: tl.tensor,
    products: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    """COLUMN_TILE of the parts' ranks of one block a program. inner: [places, width]"""
    block = blocks + 3 * tl.program_id(0)
    slot, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    matrix, rank = entry(table, slot, product, products, capacity)
    columns = PARTS * rank
    if (first < end) & (tl.program_id(1) * COLUMN_TILE < columns):
        place = first + tl.arange(0, ROW_TILE)
        real = place < end
        row = tl.load(order + place, mask=real & (ordered != 0), other=place)
        column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        step = tl.arange(0, SIZE_TILE)
        left = x + row[:, None] * INPUTS + step[None, :]
        right = weights + matrix + column[None, :] * INPUTS + step[:, None]
        acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
        for start in range(0, INPUTS, SIZE_TILE):
            inside = step < INPUTS - start
            a = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=(column < columns)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")
        if scales is not None:
            acc *= tl.load(scales + row, mask=real, other=0.0)[:, None]
        cell = place[:, None] * width * UNIT + column[None, :]
        tl.store(inner + cell, acc.to(inner.dtype.element_ty), mask=real[:, None] & (column < columns)[None, :])


@jit("blocks", "product", "products", "capacity", "width", "order", "ordered")
def _expand(
    y: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    product: tl.tensor,
    products: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
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
    matrix, rank = entry(table, slot, product, products, capacity)
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
        left = inner + place[:, None] * width * UNIT + part * rank + step[None, :]
        right = weights + matrix + PARTS * rank * INPUTS + column[None, :] * rank + step[:, None]
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
