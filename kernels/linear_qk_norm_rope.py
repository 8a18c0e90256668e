"""The product with queries, keys and values in one launch with what follows: QK-norm, rotation and the write to slots.

Apart, the product writes [tokens, heads + 2 · kv_heads, head_dim] to memory, and :mod:`kernels.qk_norm_rope` reads it again. Here a
program computes whole heads of a block of tokens, and rounds them once. Also of FP8 codes (:mod:`kernels.quantize`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.product_tiles import Tiles, block, is_aligned, is_hopper, place
from yardstick_llm.kernels.qk_norm_rope import bounded, check_qk_norm_rope, qk_norm_rope_write_reference, store_halves
from yardstick_llm.kernels.quantize import FP8, expect_scales, scaled_linear_reference
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl

MIN_ROWS = 1024
"""With fewer rows, too few tiles occupy a GPU."""

TILES = Tiles(rows=128, columns=256, step=64, stages=3, warps=8)
FP8_TILES = Tiles(rows=128, columns=256, step=128, stages=3, warps=8)
SMALL = Tiles(rows=16, columns=64, step=16, tma=False, warps=4)
"""For float32, which only tests use."""


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel takes these tensors, and there are enough rows to occupy a GPU; see :func:`linear_qk_norm_rope_triton`."""
    return (
        launches(x, weight, bias)
        and x.dtype == weight.dtype
        and is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16, FP8)
        and len(x) >= MIN_ROWS
        and 2 * cos.shape[-1] == head_dim
        and head_dim in (64, 128, 256)
        and x.shape[1] % _chosen(x.dtype).step == 0
        and heads_of_tile(_chosen(x.dtype), len(weight) // head_dim - 2 * kv_heads, kv_heads, head_dim) * head_dim >= 128
        and is_aligned(x, weight)
    )


def heads_of_tile(tiles: Tiles, heads: int, kv_heads: int, head_dim: int) -> int:
    """Heads that a tile of at most ``tiles.columns`` columns has: all of them queries, keys or values."""
    common = math.gcd(heads, kv_heads)
    return min(common & -common, max(1, tiles.columns // head_dim))


def linear_qk_norm_rope_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
) -> Tensor:
    """:func:`linear_qk_norm_rope_triton` in plain PyTorch, which rounds the product too."""
    if x_scales is None or weight_scales is None:
        qkv = linear(x, weight, bias)
    else:
        qkv = scaled_linear_reference(x, x_scales, weight, weight_scales, bias)
    qkv = qkv.view(len(x), len(weight) // keys.shape[2], keys.shape[2])
    return qk_norm_rope_write_reference(qkv, q_weight, k_weight, eps, cos, sin, keys, values, slots, scales, out)


def linear_qk_norm_rope_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply, write the keys, normalised and rotated, and the values to their slots, and return the queries likewise; on a GPU.

    x: [tokens, in]; weight: [(heads + 2 · kv_heads) · head_dim, in]; bias: [out] or None; the others are those of
    :func:`kernels.qk_norm_rope.qk_norm_rope_write`, except that heads are rotated whole. -> [tokens, heads, head_dim].

    x_scales: [tokens, 1], and weight_scales: [out, 1], float32, where x and weight are e4m3 codes; the results are then bfloat16.
    in is a multiple of the tiles' step, and head_dim is a power of two. ``tiles``: in place of the chosen ones.

    Raises ValueError for other shapes, dtypes, devices or layouts. Slots are not checked: that would wait for the GPU.
    """
    expect_device("x", x)
    (tokens, size), columns = x.shape, len(weight)
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    expect("x", x, x, (tokens, size), (*FLOATS, FP8))
    expect("weight", weight, x, (columns, size), (x.dtype,))
    expect_scales(x, x_scales, weight_scales, columns)
    if bias is not None:
        expect("bias", bias, x, (columns,), (dtype,))
    kv_heads, head_dim = keys.shape[1:]
    heads = columns // head_dim - 2 * kv_heads
    # The product itself exists in no memory: a view of one head has its shape.
    qkv = x.new_empty(head_dim, dtype=dtype).expand(tokens, heads + 2 * kv_heads, head_dim)
    check_qk_norm_rope(qkv, q_weight, k_weight, cos, sin, keys, values, slots, scales, dense_axes=1)
    tiles = tiles or _chosen(x.dtype)
    if (
        head_dim < 16
        or head_dim != power_of_two(head_dim)
        or 2 * cos.shape[1] != head_dim
        or columns % head_dim
        or size % tiles.step
    ):
        raise ValueError(
            f"weight has shape {list(weight.shape)}, heads have {head_dim} elements and {2 * cos.shape[1]} are rotated, where a"
            f" multiple of {tiles.step} columns, a power of two from 16 on and all are expected"
        )
    for name, tensor in (("q_weight", q_weight), ("k_weight", k_weight), ("keys", keys), ("values", values)):
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} begins at {tensor.data_ptr()}, where a multiple of 16 bytes is expected")
    if out is not None:
        expect("out", out, x, (tokens, heads, head_dim), (dtype,))
    q = x.new_empty((tokens, heads, head_dim), dtype=dtype) if out is None else out
    tile_heads = heads_of_tile(tiles, heads, kv_heads, head_dim)
    count = -(-tokens // tiles.rows) * (columns // (tile_heads * head_dim))
    if count:
        programs = tiles.programs(count, x.device)
        _linear_qk_norm_rope[(programs,)](
            tiles.operand(x, tiles.rows), tiles.operand(weight, tile_heads * head_dim), bias, x_scales, weight_scales, q_weight,
            k_weight, eps, cos, sin, q, keys, values, slots, scales, tokens, programs, heads, kv_heads, head_dim // 2, size,
            tiles.rows, tile_heads, tiles.step, tiles.group, tiles.tma, tiles.flatten,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return q


def _chosen(dtype: torch.dtype) -> Tiles:
    return FP8_TILES if dtype == FP8 else SMALL if dtype == torch.float32 else TILES


@jit("rows", "programs")
def _linear_qk_norm_rope(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    programs: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
) -> None:
    """Each program computes every ``programs``-th tile of ROWS tokens and HEADS heads, which are all queries, keys or values."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) // HEADS
    COLUMNS: tl.constexpr = HEADS * 2 * HALF
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=FLATTEN):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP)
        row, head = row_tile * ROWS, column_tile * HEADS
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, SIZE, STEP):
            left = block(x, row, start, rows, SIZE, ROWS, STEP, TMA)
            right = block(weight, head * (2 * HALF), start, column_tiles * COLUMNS, SIZE, COLUMNS, STEP, TMA)
            acc = tl.dot(left, right.T, acc, input_precision="ieee")
        token = row + tl.arange(0, ROWS)
        kept = token < rows
        # The elements of both halves that are rotated together are in the registers of one thread.
        first, second = tl.split(tl.permute(tl.reshape(acc, [ROWS, HEADS, 2, HALF]), [0, 1, 3, 2]))
        heads, element = head + tl.arange(0, HEADS), tl.arange(0, HALF)
        columns = heads[:, None] * (2 * HALF) + element[None, :]
        if x_scales is not None:
            x_scale = tl.load(x_scales + token, mask=kept, other=0.0)[:, None, None]
            first *= x_scale * tl.load(weight_scales + columns)[None, :, :]
            second *= x_scale * tl.load(weight_scales + columns + HALF)[None, :, :]
        if bias is not None:
            first += tl.load(bias + columns).to(tl.float32)[None, :, :]
            second += tl.load(bias + columns + HALF).to(tl.float32)[None, :, :]
        # Branches would keep the loop from being flattened. Values are multiplied by one, and turned by no angle.
        is_query, is_value = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
        if q_weight is not None:
            scale = tl.rsqrt(tl.sum(first * first + second * second, axis=2) / (2 * HALF) + eps)[:, :, None]
            scale = tl.where(is_value, 1.0, scale)
            norm = _address(is_query, q_weight, k_weight) + element
            normed = (element < HALF) & (head < Q_HEADS + KV_HEADS)
            first *= scale * tl.load(norm, mask=normed, other=1.0).to(tl.float32)[None, None, :]
            second *= scale * tl.load(norm + HALF, mask=normed, other=1.0).to(tl.float32)[None, None, :]
        angles = token.to(tl.int64)[:, None] * HALF + element[None, :]
        turned = (kept & (head < Q_HEADS + KV_HEADS))[:, None]
        cosines = tl.load(cos + angles, mask=turned, other=1.0)[:, None, :]
        sines = tl.load(sin + angles, mask=turned, other=0.0)[:, None, :]
        first, second = first * cosines - second * sines, second * cosines + first * sines
        slot = tl.load(slots + token, mask=kept, other=0)
        q_first, q_second = first, second
        if scales is not None:
            q_factor = tl.load(scales + heads // (Q_HEADS // KV_HEADS), mask=heads < Q_HEADS, other=1.0)[None, :, None]
            q_first, q_second = first * q_factor, second * q_factor
            factor = tl.div_rn(1.0, tl.load(scales + heads - Q_HEADS, mask=heads >= Q_HEADS, other=1.0))[None, :, None]
            first, second = bounded(first * factor), bounded(second * factor)
        # One store of selected addresses takes fewer registers than three, two of them masked.
        cache_start = _address(is_value, values, keys) + slot * (KV_HEADS * 2 * HALF)
        cache_head = heads - tl.where(is_value, Q_HEADS + KV_HEADS, Q_HEADS)
        query_start = q + token.to(tl.int64) * (Q_HEADS * 2 * HALF)
        if scales is not None:
            _store(query_start, heads, q_first, q_second, kept & is_query, HALF)
            _store(cache_start, cache_head, first, second, kept & (head >= Q_HEADS), HALF)
        else:
            start = tl.where(is_query, query_start.to(tl.int64), cache_start.to(tl.int64)).to(q.dtype)
            start = tl.multiple_of(start, 16)
            _store(start, tl.where(is_query, heads, cache_head), first, second, kept, HALF)


@jit()
def _address(condition: tl.tensor, yes: tl.tensor, no: tl.tensor) -> tl.tensor:
    """One of two pointers to tensors, which begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.where(condition, yes.to(tl.int64), no.to(tl.int64)).to(yes.dtype), 16)


@jit()
def _store(
    starts: tl.tensor, heads: tl.tensor, first: tl.tensor, second: tl.tensor, kept: tl.tensor, HALF: tl.constexpr
) -> None:  # fmt: skip
    """Write both halves, [rows, heads, HALF], of ``heads`` of the rows that begin at ``starts``."""
    left = starts[:, None, None] + (heads * (2 * HALF))[None, :, None] + tl.arange(0, HALF)[None, None, :]
    store_halves(left, left + HALF, first, second, kept[:, None, None])
