"""QK-norm, rotation and the write to slots, with the additions of LoRA adapters to queries, keys and values in the same launch.

The product is read once and not written again. Each program has a block of rows of one adapter and a few heads, so that a tile of
its matrix B serves all rows of the program.
"""

from __future__ import annotations

from torch import Tensor

from yardstick_llm.kernels.lora import check_delta, expand_lora_reference, tables
from yardstick_llm.kernels.lora_layout import ROW_BLOCKS, LoraDelta
from yardstick_llm.kernels.lora_tiles import RANK_TILE, REGISTERS, UNIT, entry, expanded_pair
from yardstick_llm.kernels.qk_norm_rope import check_qk_norm_rope, halves, qk_norm_rope_write_reference, rotated, store_halves
from yardstick_llm.kernels.runtime import jit, launches, power_of_two, tl

HEADS_OF_LARGE_BLOCKS = 2
"""Heads of a program with a whole large block: cosines and sines are as many bytes as a head, and are read for the first one."""
WARP_BYTES = 1024
"""Bytes of half a head, in all its rows, that a warp has in its registers."""
MOST_WARPS = 16
"""Where a large block needs more, a program has as many rows as a small block has, of one head: 32 rows of float32 heads of 256, or
16 rows of two such heads, spill registers."""


def lora_rope_write(
    qkv: Tensor,
    delta: LoraDelta,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """:func:`~kernels.qk_norm_rope.qk_norm_rope_write` of ``qkv`` with the additions ``delta``.

    qkv: [tokens, heads + 2 · kv_heads, head_dim], undefined afterwards; ``delta.rows`` has no order. -> [tokens, heads, head_dim].
    """
    fused = launches(qkv, delta.inner, q_weight, k_weight)
    operation = lora_rope_write_triton if fused else lora_rope_write_reference
    return operation(qkv, delta, q_weight, k_weight, eps, cos, sin, keys, values, slots)


def lora_rope_write_reference(
    qkv: Tensor,
    delta: LoraDelta,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """:func:`lora_rope_write` in plain PyTorch."""
    added = expand_lora_reference(qkv.flatten(1), delta).view_as(qkv)
    return qk_norm_rope_write_reference(added, q_weight, k_weight, eps, cos, sin, keys, values, slots)


def lora_rope_write_triton(
    qkv: Tensor,
    delta: LoraDelta,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """:func:`lora_rope_write` on a GPU, rounded once. All contiguous, and of one dtype but for cos, sin and slots.

    Raises ValueError for other shapes, dtypes, devices or layouts. Slots are not checked: that would wait for the GPU.
    """
    check_qk_norm_rope(qkv, q_weight, k_weight, cos, sin, keys, values, slots, None)
    check_delta(delta, qkv)
    _, product, rows = delta
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, parts = keys.shape[1], len(product.parts)
    heads = all_heads - 2 * kv_heads
    columns = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    if rows.order is not None:
        raise ValueError("delta has rows in an order of their own, where all tokens are expected as they are")
    if product.parts not in (columns, (sum(columns),)) or len(delta.inner) != tokens:
        raise ValueError(f"delta has parts {product.parts} of {len(delta.inner)} rows, where {columns} of {tokens} are expected")
    q = qkv.new_empty((tokens, heads, head_dim))
    half = max(16, power_of_two(head_dim // 2))
    elements = WARP_BYTES // qkv.element_size()
    row_tile = rows.size if rows.size * half <= MOST_WARPS * elements else ROW_BLOCKS[0]
    warps = max(4, row_tile * half // elements)
    tiles = rows.size // row_tile
    head_tile = HEADS_OF_LARGE_BLOCKS if row_tile == ROW_BLOCKS[1] else 1
    _lora_rope_write[-(-all_heads // head_tile), len(rows.blocks) // 3 * tiles](
        qkv, q_weight, k_weight, eps, cos, sin, q, keys, values, slots, *tables(delta), product.inputs, parts, heads, kv_heads,
        head_dim // 2, cos.shape[1], tiles, row_tile, head_tile, half, RANK_TILE, num_warps=warps, num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip
    return q


@jit("slots", "blocks", "product", "products", "capacity", "width")
def _lora_rope_write(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    product: tl.tensor,
    products: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_TILE: tl.constexpr,
) -> None:
    """HEAD_TILE heads of one of the TILES of a block's rows a program, one head after the other, each in two halves as in
    :mod:`kernels.qk_norm_rope`."""
    block = blocks + 3 * (tl.program_id(1) // TILES)
    slot, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    begin += tl.program_id(1) % TILES * ROW_TILE
    if begin < end:
        matrix, rank = entry(table, slot, product, products, capacity)
        b = weights + matrix + PARTS * rank * INPUTS
        row = begin + tl.arange(0, ROW_TILE)
        real = row < end
        columns = tl.arange(0, BLOCK)
        inside = columns < HALF
        left, right = halves(columns, HALF, ROTATED)
        kept = real[:, None] & inside[None, :]
        to = tl.load(slots + row, mask=real, other=0)
        all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
        head = tl.program_id(0) * HEAD_TILE
        for _ in range(tl.minimum(HEAD_TILE, all_heads - head)):
            start = qkv + (row * all_heads + head)[:, None] * (2 * HALF)
            first = tl.load(start + left[None, :], mask=kept, other=0.0)
            second = tl.load(start + right[None, :], mask=kept, other=0.0)
            part = 0
            if PARTS > 1:
                part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
            column = head * 2 * HALF
            first_delta, second_delta = expanded_pair(
                inner + row * width * UNIT + part * rank, 0, b + (column + left) * rank, b + (column + right) * rank,
                rank, real, inside, True, ROW_TILE, BLOCK, RANK_TILE,
            )  # fmt: skip
            first = first.to(tl.float32) + first_delta
            second = second.to(tl.float32) + second_delta
            if head >= HEADS + KV_HEADS:
                value = values + (to * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * (2 * HALF)
                store_halves(value + left[None, :], value + right[None, :], first, second, kept)
            else:
                if q_weight is not None:
                    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
                    is_query = head < HEADS
                    first = first * scale * _weight(q_weight, k_weight, is_query, left, inside)
                    second = second * scale * _weight(q_weight, k_weight, is_query, right, inside)
                turned = real[:, None] & (columns < ROTATED)[None, :]
                angle = row[:, None] * ROTATED + columns[None, :]
                first, second = rotated(first, second, cos + angle, sin + angle, turned)
                if head < HEADS:
                    query = q + (row * HEADS + head)[:, None] * (2 * HALF)
                    store_halves(query + left[None, :], query + right[None, :], first, second, kept)
                else:
                    key = keys + (to * KV_HEADS + head - HEADS)[:, None] * (2 * HALF)
                    store_halves(key + left[None, :], key + right[None, :], first, second, kept)
            head += 1


@jit()
def _weight(q_weight: tl.tensor, k_weight: tl.tensor, is_query: tl.tensor, columns: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """[1, columns] float32"""
    query = tl.load(q_weight + columns, mask=inside & is_query, other=0.0)
    key = tl.load(k_weight + columns, mask=inside & (is_query == 0), other=0.0)
    return tl.where(is_query, query, key).to(tl.float32)[None, :]
