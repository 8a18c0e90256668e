"""The gate of a feed-forward layer, with the additions of LoRA adapters to gate and up in the same launch.

The product is read once and not written again. Each program has a block of rows of one adapter, so that a tile of its matrix B
serves all rows of the program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.gelu_mul import gelu_mul_reference
from yardstick_llm.kernels.lora import check_delta, expand_lora_reference, orders, tables
from yardstick_llm.kernels.lora_layout import ROW_BLOCKS, LoraDelta
from yardstick_llm.kernels.lora_tiles import RANK_TILE, REGISTERS, UNIT, entry, expanded_pair
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl
from yardstick_llm.kernels.silu_mul import gated, silu_mul_reference


def lora_gate(gate_up: Tensor, delta: LoraDelta, *, gelu: bool) -> Tensor:
    """Return :func:`~kernels.silu_mul.silu_mul` of ``gate_up`` with the additions ``delta``, or with ``gelu``
    :func:`~kernels.gelu_mul.gelu_mul`. gate_up: [tokens, 2 · size], undefined afterwards. -> [tokens, size]."""
    return (lora_gate_triton if launches(gate_up, delta.inner) else lora_gate_reference)(gate_up, delta, gelu=gelu)


def lora_gate_reference(gate_up: Tensor, delta: LoraDelta, *, gelu: bool) -> Tensor:
    """:func:`lora_gate` in plain PyTorch."""
    return (gelu_mul_reference if gelu else silu_mul_reference)(expand_lora_reference(gate_up, delta))


def lora_gate_triton(gate_up: Tensor, delta: LoraDelta, *, gelu: bool) -> Tensor:
    """:func:`lora_gate` on a GPU, rounded once. Contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    expect_device("gate_up", gate_up)
    check_delta(delta, gate_up)
    _, product, rows = delta
    tokens, size, parts = len(delta.inner), gate_up.shape[-1] // 2, len(product.parts)
    expect("gate_up", gate_up, gate_up, (tokens, 2 * size), FLOATS)
    if product.parts not in ((size, size), (2 * size,)):
        raise ValueError(f"parts is {product.parts}, where gate and up of {size} columns are expected")
    out = gate_up.new_empty((tokens, size))
    exact, large = gate_up.dtype == torch.float32, rows.size == ROW_BLOCKS[1]
    column_tile = 32 if exact else 128
    _lora_gate[-(-size // column_tile), len(rows.blocks) // 3](
        gate_up, out, *tables(delta), *orders(rows), product.inputs, parts, size, gelu, rows.size, column_tile, RANK_TILE,
        num_warps=8 if large else 4, num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


@jit("blocks", "product", "products", "capacity", "width", "order", "ordered")
def _lora_gate(
    gate_up: tl.tensor,
    out: tl.tensor,
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
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
) -> None:
    """COLUMN_TILE columns of the result of one block a program."""
    block = blocks + 3 * tl.program_id(1)
    slot, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if begin < end:
        matrix, rank = entry(table, slot, product, products, capacity)
        place = begin + tl.arange(0, ROW_TILE)
        real = place < end
        row = tl.load(order + place, mask=real & (ordered != 0), other=place)
        column = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        kept = column < SIZE
        mask = real[:, None] & kept[None, :]
        cell = gate_up + row[:, None] * (2 * SIZE) + column[None, :]
        gate = tl.load(cell, mask=mask, other=0.0)
        up = tl.load(cell + SIZE, mask=mask, other=0.0)
        b = weights + matrix + PARTS * rank * INPUTS
        gate_delta, up_delta = expanded_pair(
            inner + place * width * UNIT, rank, b + column * rank, b + (SIZE + column) * rank, rank, real, kept,
            PARTS == 1, ROW_TILE, COLUMN_TILE, RANK_TILE,
        )  # fmt: skip
        result = gated(gate.to(tl.float32) + gate_delta, up.to(tl.float32) + up_delta, GELU)
        tl.store(out + row[:, None] * SIZE + column[None, :], result.to(out.dtype.element_ty), mask=mask)
