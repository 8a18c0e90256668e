"""Attention of several one-token branches of a row, all at the position after the row's prefix: a prefix is read once for all of
them.

A branch attends to its row's prefix and to itself, not to the other branches. Its own key and value are passed as tensors, not in
a slot, so the running softmax starts with them. The query heads of one key head of all branches fill one block. Where there are
few rows, each prefix is cut into chunks, whose results are merged as in :mod:`kernels.paged_attention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yardstick_llm.kernels.attention_layout import MIN_CHUNK, NARROW, PROGRAMS
from yardstick_llm.kernels.paged_attention import attend_block, block_keys, expect_heads, merge_partials, merged_heads, precision
from yardstick_llm.kernels.runtime import expect, jit, launches, power_of_two, tl

MAX_ROWS = 128
"""Branches × query heads a key head, of one row."""


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    counts: Tensor,
    starts: Tensor | None = None,
) -> Tensor:
    """Each branch attends to the prefix of its row and to itself.

    q: [rows · branches, heads, head_dim], row by row; k, v: [rows · branches, kv_heads, head_dim]; keys, values: [slots, kv_heads,
    head_dim]; kv_indptr: [rows + 1], start of each row's prefix in the flat list ``kv_indices``; counts: [rows], number of real
    branches of each row, which come first; starts: [rows], place of each row's first branch, where rows with few branches leave no
    room between them. The host reads none of these, so the step itself may compute ``counts`` and ``starts``.
    -> [rows · branches, heads, head_dim]; where there is no branch zeros, or with ``starts`` undefined.
    """
    operation = branch_attention_triton if launches(q, k, v, keys, values) else branch_attention_reference
    return operation(q, k, v, keys, values, kv_indptr, kv_indices, counts, starts=starts)


def branch_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    counts: Tensor,
    starts: Tensor | None = None,
) -> Tensor:
    """:func:`branch_attention` in plain PyTorch, row by row; what is undefined is NaN."""
    group, branches = q.shape[1] // keys.shape[1], len(q) // len(counts)
    out = torch.zeros_like(q) if starts is None else torch.full_like(q, float("nan"))
    begins = range(0, len(q), branches) if starts is None else starts.tolist()
    places = kv_indptr.tolist()
    for row, (begin, count) in enumerate(zip(begins, counts.tolist(), strict=True)):
        mine = slice(begin, begin + count)
        prefix = kv_indices[places[row] : places[row + 1]]
        wide, own = q[mine].float(), k[mine].float().repeat_interleave(group, 1)
        before, prefix_values = (cache[prefix].float().repeat_interleave(group, 1) for cache in (keys, values))
        scores = torch.cat([torch.einsum("bhd,lhd->bhl", wide, before), (wide * own).sum(-1, keepdim=True)], -1)
        weights = (scores / math.sqrt(q.shape[2])).softmax(-1)
        result = torch.einsum("bhl,lhd->bhd", weights[..., :-1], prefix_values)
        out[mine] = (result + weights[..., -1:] * v[mine].float().repeat_interleave(group, 1)).to(q.dtype)
    return out


def branch_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    counts: Tensor,
    chunks: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """:func:`branch_attention` on a GPU. q, k and v may be parts of the fused projection.

    chunks: number of chunks of each prefix, a power of two; None: derived from the length of ``kv_indices``, which may then hold
    nothing but the prefixes. Raises ValueError for other shapes, dtypes, devices or strides.
    """
    _check(q, k, v, keys, values, kv_indptr, kv_indices, counts)
    if starts is not None:
        expect("starts", starts, q, (len(counts),), (torch.int64,))
    tokens, heads, head_dim = q.shape
    rows, kv_heads = len(counts), keys.shape[1]
    branches, group = tokens // max(1, rows), heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    if chunks is None:
        chunks = chunks_of(len(kv_indices) // rows, rows * kv_heads)
    partial_outs = q.new_empty((chunks if chunks > 1 else 0, *q.shape), dtype=torch.float32)
    partial_lses = q.new_empty((chunks if chunks > 1 else 0, tokens, heads), dtype=torch.float32)
    block = max(NARROW, power_of_two(branches * group))
    _attend[(rows * kv_heads, chunks)](
        q, k, v, keys, values, out, kv_indptr, kv_indices, counts, counts if starts is None else starts, partial_outs, partial_lses,
        math.log2(math.e) / math.sqrt(head_dim), tokens, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], keys.stride(0),
        branches, chunks, kv_heads, group, head_dim, block, block_keys(head_dim, q.dtype), chunks > 1, starts is not None,
        precision(q.dtype), num_warps=8 if block > 64 else 4, num_stages=2 if block > 64 else 3,
    )  # fmt: skip
    if chunks > 1:
        tile = merged_heads(heads, head_dim)
        _merge[(tokens, -(-heads // tile))](out, partial_outs, partial_lses, tokens, chunks, heads, head_dim, tile)
    return out


def chunks_of(prefix: int, programs: int) -> int:
    """Chunks of prefixes of this length on average, a power of two, where one each makes ``programs``."""
    most = min(-(-prefix // MIN_CHUNK), PROGRAMS // programs)
    return 1 << max(0, most.bit_length() - 1)


def _check(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, kv_indptr: Tensor, kv_indices: Tensor, counts: Tensor
) -> None:
    expect_heads(q, keys, values, q.dtype)
    expect("k", k, q, (len(q), *keys.shape[1:]), (q.dtype,), dense_axes=1)
    expect("v", v, q, (len(q), *keys.shape[1:]), (q.dtype,), dense_axes=1)
    expect("kv_indptr", kv_indptr, q, (len(counts) + 1,), (torch.int64,))
    expect("kv_indices", kv_indices, q, (kv_indices.numel(),), (torch.int64,))
    expect("counts", counts, q, (counts.numel(),), (torch.int64,))
    if len(q) % max(1, len(counts)) or (len(q) and not len(counts)):
        raise ValueError(f"{len(q)} branches are no whole number for each of {len(counts)} rows")
    if len(q) * q.shape[1] > MAX_ROWS * len(counts) * keys.shape[1]:
        raise ValueError(f"branches times query heads a key head are more than {MAX_ROWS}, all that a block holds")


@jit("kv_indptr", "kv_indices", "counts", "starts", "tokens", "branches", "chunks")
def _attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    partial_outs: tl.tensor,
    partial_lses: tl.tensor,
    scale: tl.tensor,
    tokens: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    branches: tl.tensor,
    chunks: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program computes one row, key head and chunk. Row r of the block is branch r // GROUP, query head r % GROUP of the key
    head.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    place = tl.program_id(0) // KV_HEADS
    chunk = tl.program_id(1)
    count = tl.load(counts + place)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)
    branch = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (branch < branches) & (branch < count)
    if PACKED:
        token = tl.load(starts + place) + branch
        written = real  # what follows are the branches of another row
    else:
        token = (place * branches + branch).to(tl.int64)
        written = branch < branches
    q_cell = token * q_token_stride + head * q_head_stride
    block = tl.load(q + q_cell[:, None] + column[None, :], mask=real[:, None], other=0.0)

    k_cell = token * k_token_stride + kv_head * k_head_stride
    v_cell = token * v_token_stride + kv_head * v_head_stride
    own_keys = tl.load(k + k_cell[:, None] + column[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    own_values = tl.load(v + v_cell[:, None] + column[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    # The first chunk contains the branch itself, so it has at least one key even if the prefix is empty.
    first_chunk = chunk == 0
    peak = tl.where(first_chunk, tl.sum(block.to(tl.float32) * own_keys, 1) * scale, float("-inf"))
    total = tl.where(first_chunk, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    acc = tl.where(first_chunk, own_values, 0.0)

    begin = tl.load(kv_indptr + place).to(tl.int32)
    end = tl.load(kv_indptr + place + 1).to(tl.int32)
    size = tl.cdiv(tl.cdiv(end - begin, chunks), KEYS) * KEYS
    begin += chunk * size
    end = tl.where(count > 0, tl.minimum(end, begin + size), begin)
    for first in range(begin, end, KEYS):
        nth = first + tl.arange(0, KEYS)
        # Beyond the end, read the chunk's last slot again: another request's slot might hold values that are not finite.
        slot = tl.load(kv_indices + tl.minimum(nth, end - 1))
        cell = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column[None, :]
        seen = (nth < end)[None, :] & real[:, None]
        peak, total, acc = attend_block(
            block, tl.load(keys + cell), tl.load(values + cell), seen, scale, 0.0, peak, total, acc, PRECISION, False
        )

    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]
    cell = token * HEADS + head
    if SPLIT:
        cell += chunk.to(tl.int64) * tokens * HEADS
        tl.store(partial_outs + cell[:, None] * HEAD_DIM + column[None, :], result, mask=written[:, None])
        tl.store(partial_lses + cell, peak + tl.log2(total), mask=written)
    else:
        tl.store(out + cell[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty), mask=written[:, None])


@jit("tokens", "chunks")
def _merge(
    out: tl.tensor,
    partial_outs: tl.tensor,
    partial_lses: tl.tensor,
    tokens: tl.tensor,
    chunks: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each program merges one token and TILE heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    result = merge_partials(partial_outs, partial_lses, token, chunks, tokens, head, HEADS, HEAD_DIM)
    cell = (token * HEADS + head[:, None]) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + cell, result.to(out.dtype.element_ty), mask=(head < HEADS)[:, None])
