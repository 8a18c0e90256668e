"""Causal attention of segments of new tokens over slots, for segments of any lengths at once.

The context of a segment is a list of slots, of which the last are those of its own tokens; lists may share slots. The host cuts
the work, see :mod:`kernels.attention_layout`. The softmax is computed block by block (Milakov and Gimelshein 2018, arXiv
1805.02867), in base 2; several programs read a long context (Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yardstick_llm.kernels.attention_layout import NARROW, Layout
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.quantize import FP8
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl
from yardstick_llm.kernels.soft_cap import NO_CAP, capped, soft_cap

LOG2E = math.log2(math.e)
HEAD_DIMS = (16, 32, 64, 128, 256)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, value_scales: Tensor | None = None, spec: AttentionSpec = PLAIN
) -> Tensor:
    """Each query attends to its segment's context up to and including its own slot, or to the window that ``spec`` has.

    q: [queries, heads, head_dim], segment after segment; keys, values: [slots, kv_heads, head_dim]; layout: on the same device. ->
    [queries, heads, head_dim]. value_scales: [kv_heads] float32, where keys and values are e4m3 codes (:mod:`kernels.kv_codes`) and
    q is multiplied by the scales of the keys.
    """
    operation = paged_attention_triton if launches(q, keys, values) else paged_attention_reference
    return operation(q, keys, values, layout, value_scales, spec)


def paged_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, value_scales: Tensor | None = None, spec: AttentionSpec = PLAIN
) -> Tensor:
    """:func:`paged_attention` in plain PyTorch, segment by segment."""
    group = q.shape[1] // keys.shape[1]
    qo_indptr, kv_indptr = layout.qo_indptr.tolist(), layout.kv_indptr.tolist()
    out = torch.empty_like(q)
    scales = 1.0 if value_scales is None else value_scales.repeat_interleave(group)[:, None]
    for segment in range(len(qo_indptr) - 1):
        rows = slice(qo_indptr[segment], qo_indptr[segment + 1])
        kv_indices = layout.kv_indices[kv_indptr[segment] : kv_indptr[segment + 1]]
        k, v = (cache.index_select(0, kv_indices).float().repeat_interleave(group, 1) for cache in (keys, values))
        scores = soft_cap(torch.einsum("qhd,khd->hqk", q[rows].float(), k) * spec.scale_of(q.shape[2]), spec.soft_cap)
        before = len(kv_indices) - scores.shape[1]
        everything = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        hidden = everything.triu(before + 1)
        if spec.window is not None:
            hidden |= everything.tril(before - spec.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = (torch.einsum("hqk,khd->qhd", weights, v) * scales).to(q.dtype)
    return out


def block_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of the larger block. In 16 bits ptxas keeps 128 in registers; float32, without tensor cores, is there for exactness."""
    return 128 if head_dim <= 128 and dtype.itemsize == 2 else 32


def block_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a block: what fits shared memory twice over."""
    return 64 if head_dim * dtype.itemsize <= 256 else 32


def precision(dtype: torch.dtype) -> str:
    """Float32 is multiplied as such: ten bits of TF32 would not do for a score."""
    return "ieee" if dtype == torch.float32 else "tf32"


def paged_attention_triton(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout, value_scales: Tensor | None = None, spec: AttentionSpec = PLAIN
) -> Tensor:
    """:func:`paged_attention` on a GPU. q may be a part of the fused projection.

    Raises ValueError for other shapes, dtypes, devices or strides.
    """
    expect_heads(q, keys, values, q.dtype if value_scales is None else FP8)
    if value_scales is not None:
        expect("value_scales", value_scales, q, keys.shape[1:2], (torch.float32,))
    expect("layout.out_cache_loc", layout.out_cache_loc, q, (len(q),), (torch.int64,))
    heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial_outs = q.new_empty((layout.partials, heads, head_dim), dtype=torch.float32)
    partial_lses = q.new_empty((layout.partials, heads), dtype=torch.float32)

    def launch(items: Tensor, rows: int, num_warps: int, num_stages: int) -> None:
        kv_heads = keys.shape[1]
        _attend[(len(items) * kv_heads,)](
            q, keys, values, value_scales, out, items, layout.kv_indices, partial_outs, partial_lses,
            LOG2E * spec.scale_of(head_dim), LOG2E * spec.soft_cap, spec.window or 0, q.stride(0), q.stride(1), keys.stride(0),
            kv_heads, heads // kv_heads, head_dim, rows, block_keys(head_dim, q.dtype), precision(q.dtype),
            spec.soft_cap != NO_CAP, spec.window is not None,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    if layout.narrow:
        launch(layout.items[: layout.narrow], NARROW, 4, 3)
    if layout.narrow < len(layout.items):
        rows = block_rows(head_dim, q.dtype)
        launch(layout.items[layout.narrow :], rows, 8 if rows > 64 else 4, 2)
    if len(layout.merges):
        tile = merged_heads(heads, head_dim)
        grid = len(layout.merges), -(-heads // tile)
        _merge[grid](out, layout.merges, partial_outs, partial_lses, heads, head_dim, tile)
    return out


def merged_heads(heads: int, head_dim: int) -> int:
    """Heads whose partial results a program merges: 2,048 elements at most."""
    return min(power_of_two(heads), 2048 // head_dim)


def expect_heads(q: Tensor, keys: Tensor, values: Tensor, kept: torch.dtype) -> None:
    """Raises ValueError unless these are queries [tokens, heads, head_dim] and slots [slots, kv_heads, head_dim] that the kernels
    take, the slots of dtype ``kept``."""
    expect_device("q", q)
    if q.dim() != 3 or keys.dim() != 3 or q.shape[1] % keys.shape[1] or q.shape[1] > NARROW * keys.shape[1]:
        raise ValueError(
            f"q and keys have shapes {list(q.shape)} and {list(keys.shape)}, where [tokens, heads, head_dim] and"
            f" [slots, kv_heads, head_dim] are expected, heads a multiple of kv_heads and at most {NARROW} times as many"
        )
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"heads have {q.shape[2]} elements, where {' or '.join(map(str, HEAD_DIMS))} is expected")
    expect("q", q, q, q.shape, FLOATS, dense_axes=1)
    expect("keys", keys, q, (*keys.shape[:2], q.shape[2]), (kept,))
    expect("values", values, q, keys.shape, (kept,))


@jit()
def attend_block(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take a block of keys into the running softmax.

    q: [rows, head_dim]; keys, values: [keys, head_dim]; seen: [rows, keys]; scale: of the scores, times log2(e); cap: soft cap
    of the scores, times log2(e); peak, total: [rows], the largest score so far and the sum of powers of two relative to it; acc:
    [rows, head_dim].
    """
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    if CAPPED:
        scores = capped(scores, cap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A row without any key so far has peak -inf, and -inf - -inf is NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
    return higher, total, acc


@jit()
def merge_partials(
    outs: tl.tensor,
    lses: tl.tensor,
    first: tl.tensor,
    items: tl.tensor,
    stride: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """[heads, head_dim], of ``items`` partial results of one query and the heads ``head``, of which one has seen a key."""
    column, kept = tl.arange(0, HEAD_DIM)[None, :], head < HEADS
    cell = first * HEADS + head
    peak = tl.load(lses + cell, mask=kept, other=0.0)
    acc = tl.load(outs + cell[:, None] * HEAD_DIM + column, mask=kept[:, None], other=0.0)
    total = tl.zeros_like(peak) + 1.0
    for nth in range(1, items):
        cell = (first + nth * stride) * HEADS + head
        lse = tl.load(lses + cell, mask=kept, other=0.0)
        higher = tl.maximum(peak, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # where a window hides all keys of the items so far
        weight, fade = tl.exp2(lse - base), tl.exp2(peak - base)
        acc = (
            acc * fade[:, None] + tl.load(outs + cell[:, None] * HEAD_DIM + column, mask=kept[:, None], other=0.0) * weight[:, None]
        )
        total = total * fade + weight
        peak = higher
    return acc / total[:, None]


@jit("items", "kv_indices", "window")
def _attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    items: tl.tensor,
    kv_indices: tl.tensor,
    partial_outs: tl.tensor,
    partial_lses: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    """Each program computes one item and key head. Row r of the block is query r // GROUP, query head r % GROUP of the key head."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * 6
    token = tl.load(item)
    queries = tl.load(item + 1)
    begin = tl.load(item + 2).to(tl.int32)
    end = tl.load(item + 3).to(tl.int32)
    own = tl.load(item + 4).to(tl.int32)
    if WINDOWED:  # no query of the item sees what is before the window of the first
        begin = tl.maximum(begin, own - window + 1)
    partial = tl.load(item + 5)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = query < queries
    q_cell = (token + query) * q_token_stride + head * q_head_stride
    block = tl.load(q + q_cell[:, None] + column[None, :], mask=real[:, None], other=0.0)

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for first in range(begin, end, KEYS):
        place = first + tl.arange(0, KEYS)
        # Beyond the end, read the item's last slot again: another request's slot might hold values that are not finite.
        slot = tl.load(kv_indices + tl.minimum(place, end - 1))
        cell = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column[None, :]
        seen = (place < end)[None, :] & (place[None, :] <= (own + query)[:, None])
        if WINDOWED:
            seen = seen & (place[None, :] > (own + query)[:, None] - window)
        dtype = block.dtype  # of codes, which are exact in it
        k, v = tl.load(keys + cell).to(dtype), tl.load(values + cell).to(dtype)
        peak, total, acc = attend_block(block, k, v, seen, scale, cap, peak, total, acc, PRECISION, CAPPED)

    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]
    if value_scales is not None:
        result *= tl.load(value_scales + kv_head)
    if partial < 0:
        cell = (token + query) * HEADS + head
        tl.store(out + cell[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty), mask=real[:, None])
    else:
        cell = (partial + query) * HEADS + head
        tl.store(partial_outs + cell[:, None] * HEAD_DIM + column[None, :], result, mask=real[:, None])
        tl.store(partial_lses + cell, peak + tl.log2(total), mask=real)


@jit("merges")
def _merge(
    out: tl.tensor,
    merges: tl.tensor,
    partial_outs: tl.tensor,
    partial_lses: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each program merges one query and TILE heads."""
    merge = merges + tl.program_id(0) * 4
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    items = tl.load(merge + 2).to(tl.int32)
    if items > 0:
        first, stride = tl.load(merge + 1), tl.load(merge + 3)
        result = merge_partials(partial_outs, partial_lses, first, items, stride, head, HEADS, HEAD_DIM)
        cell = (tl.load(merge) * HEADS + head[:, None]) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(out + cell, result.to(out.dtype.element_ty), mask=(head < HEADS)[:, None])
