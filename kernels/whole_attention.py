"""Attention of whole sequences, one after another, whose tokens all attend to each other, or to those near them.

On a CPU in float32, compiled loops attend (:mod:`kernels.native_attention`). In plain PyTorch, sequences of one length are one call
of ``scaled_dot_product_attention``, without padding and without copies, so they are put in order of length. With a window, the
queries are cut into tiles, each with the keys that it sees. The kernel takes blocks of queries of any sequences at once, in the way
of :mod:`kernels.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.native_attention import Piece, Work, native_attention, plan, reach_of
from yardstick_llm.kernels.paged_attention import LOG2E, attend_block, block_keys, precision
from yardstick_llm.kernels.row_chunks import in_threads
from yardstick_llm.kernels.runtime import FLOATS, compiles, expect, expect_device, jit, launches, power_of_two, tl
from yardstick_llm.kernels.soft_cap import NO_CAP, soft_cap

TILE = 256
"""Queries of a tile, in layers with a window, in plain PyTorch."""
ROWS = 64
"""Queries of a program of the kernel."""
MOST_TOKENS = 1024
"""Longest sequences in bfloat16 whose scores are computed whole on a CPU. Heads of 32 took 0.5 (256 tokens) and heads of 64 0.45
(512 tokens) times as long as with torch's attention (AMD EPYC, Zen 5)."""


class Run(NamedTuple):
    """Consecutive sequences of one length."""

    start: int
    """Their first token."""
    sequences: int
    length: int
    keys: int
    """Tokens of each, the first ones, to which its tokens attend."""


Bias = Callable[[Tensor, Tensor], Tensor]
"""Takes queries, [sequences, heads, length, head_dim], and keys, [sequences, heads, keys, head_dim], of sequences of one length;
returns what is added to their scaled scores, [sequences or 1, heads, length, keys]."""


class Layout(NamedTuple):
    """Where the sequences of a step begin and end."""

    runs: list[Run]
    blocks: Tensor
    """[blocks, 4] int32, for the kernel: first token of a sequence, its length, its keys, and the block's first query in it."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        last = self.runs[-1]
        return last.start + last.sequences * last.length


def runs_of(lengths: Sequence[int], unseen: Sequence[int] | None = None) -> list[Run]:
    """Runs of sequences with these lengths, one after another. ``unseen``: tokens at the end of each to which no token attends."""
    runs, start = [], 0
    for (length, hidden), alike in groupby(zip(lengths, unseen or repeat(0), strict=False)):
        count = len(list(alike))
        runs.append(Run(start, count, length, length - hidden))
        start += count * length
    return runs


def lay_out(lengths: Sequence[int], device: torch.device, unseen: Sequence[int] | None = None) -> Layout:
    """Lay out sequences; see :func:`runs_of`."""
    runs = runs_of(lengths, unseen)
    if not launches(torch.empty(0, device=device)):
        return Layout(runs, torch.empty(0, 4, dtype=torch.int32, device=device))
    return Layout(runs, cut(runs).pin_memory().to(device, non_blocking=True))


def cut(runs: Sequence[Run]) -> Tensor:
    """:attr:`Layout.blocks` on the host, longest sequences first, which take longest."""
    alike = [run.sequences for run in runs]
    sizes, keys = (np.repeat(np.array([getattr(run, name) for run in runs], np.int64), alike) for name in ("length", "keys"))
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(-sizes, kind="stable")
    counts = -(-sizes[order] // ROWS)  # blocks of each
    which = np.repeat(order, counts)
    first = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * ROWS
    return torch.from_numpy(np.stack([starts[which], sizes[which], keys[which], first], 1).astype(np.int32))


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    spec: AttentionSpec,
    bias: Bias | None = None,
    *,
    slopes: Tensor | None = None,
    narrow: bool = False,
) -> Tensor:
    """Query i of a sequence sees key j of it where they are at most half of the window apart; without a window, all keys.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; heads and elements contiguous. -> [tokens, heads, head_dim].
    ``bias``: without a window and in plain PyTorch. ``slopes``: [heads], what is taken from a score for each token between query
    and key (ALiBi); with as many key heads, without a window and in plain PyTorch. ``narrow``: see
    :func:`~kernels.native_attention.native_attention`.
    """
    if bias is None and slopes is None:
        if launches(q, k, v):
            return whole_attention_triton(q, k, v, layout, spec)
        if compiles(q, k, v):
            return whole_attention_native(q, k, v, layout, spec, narrow=narrow)
    return whole_attention_reference(q, k, v, layout, spec, bias, slopes=slopes)


def whole_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    spec: AttentionSpec,
    bias: Bias | None = None,
    *,
    slopes: Tensor | None = None,
) -> Tensor:
    """:func:`whole_attention` in plain PyTorch."""
    out = q.new_empty(q.shape)
    for run in layout.runs:
        rows = slice(run.start, run.start + run.sequences * run.length)
        queries, keys, values, found = (_by_sequence(each[rows], run.sequences) for each in (q, k, v, out))
        keys, values = keys[:, :, : run.keys], values[:, :, : run.keys]
        if slopes is not None:
            _attend_sloped(queries, keys, values, slopes, spec, found)
        elif bias is not None:
            found.copy_(attend(queries, keys, values, bias(queries, keys), spec))
        elif _is_narrow(q) and run.length <= MOST_TOKENS and spec.soft_cap == NO_CAP and not _cuts(spec, run.length):
            _attend_in_threads(queries, keys, values, spec.scale_of(q.shape[2]), found)
        else:
            found.copy_(_attend_run(queries, keys, values, spec))
    return out


def _is_narrow(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype == torch.bfloat16


def _by_sequence(x: Tensor, count: int) -> Tensor:
    """[sequences · length, heads, head_dim] -> a view, [sequences, heads, length, head_dim]"""
    return x.view(count, -1, x.shape[1], x.shape[2]).transpose(1, 2)


def _cuts(spec: AttentionSpec, length: int) -> bool:
    """Whether a token of a sequence does not see all others."""
    return spec.window is not None and length > spec.window // 2 + 1


def _attend_run(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q: [sequences, heads, length, head_dim]; k, v: [sequences, kv_heads, keys, head_dim]. -> like q."""
    length = q.shape[2]
    if spec.window is None or not _cuts(spec, length):
        return _attend_folded(q, k, v, None, spec)
    reach = spec.window // 2
    out = torch.empty_like(q)
    for begin in range(0, length, TILE):
        end = min(begin + TILE, length)
        first, last = max(0, begin - reach), min(k.shape[2], end + reach)
        mask = _band(end - begin, last - first, begin - first, reach, q.dtype, q.device)
        out[:, :, begin:end] = _attend_folded(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], mask, spec)
    return out


def _attend_sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, spec: AttentionSpec, out: Tensor) -> None:
    """q, out: [sequences, heads, length, head_dim]; k, v: [sequences, heads, keys, head_dim]. The distances of a tile exist at a
    time, because those of 8192 tokens take 3 GiB with 12 heads."""
    keys = torch.arange(k.shape[2], device=q.device)
    for begin in range(0, q.shape[2], TILE):
        rows = slice(begin, begin + TILE)
        apart = (keys - torch.arange(q.shape[2], device=q.device)[rows, None]).abs()
        out[:, :, rows] = attend(q[:, :, rows], k, v, (-slopes[:, None, None] * apart).to(q.dtype), spec)


def _attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Query heads that share a key head are folded into the query axis, so that keys and values are never repeated."""
    sequences, heads, length, head_dim = q.shape
    fold = heads // k.shape[1]
    if fold == 1:
        return attend(q, k, v, mask, spec)
    folded = q.reshape(sequences, k.shape[1], fold * length, head_dim)
    return attend(folded, k, v, None if mask is None else mask.repeat(fold, 1), spec).view(q.shape)


@lru_cache(64)
def _band(queries: int, keys: int, shift: int, reach: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, keys], 0 where key j is within ``reach`` of query i, which is at place ``i + shift`` of the keys; else -inf."""
    places = torch.arange(queries, device=device)[:, None] + shift - torch.arange(keys, device=device)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(places.abs() > reach, float("-inf"))


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """q: [sequences, kv_heads, queries, head_dim]; keys, values: [sequences, kv_heads, keys, head_dim]; mask: added to
    the scores, None for nothing. The window of ``spec`` is the mask's business."""
    if spec.soft_cap == NO_CAP:
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=spec.scale)
    scores = soft_cap(q.float() @ keys.float().transpose(2, 3) * spec.scale_of(q.shape[3]), spec.soft_cap)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).to(values.dtype) @ values


def _attend_in_threads(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """Compute all scores of some sequences, or of some heads if there are more of them, at a time.

    q, out: [sequences, heads, length, head_dim]; k, v: [sequences, kv_heads, keys, head_dim].
    """
    grouped = len(q), k.shape[1], -1, *q.shape[2:]  # query heads of a key head beside each other
    q, out = q.view(grouped), out.view(grouped)
    if len(q) < q.shape[1]:
        q, k, v, out = (x.transpose(0, 1) for x in (q, k, v, out))

    def compute(span: slice) -> None:
        queries, keys, values = (x.contiguous() for x in (q[span] * scale, k[span], v[span]))
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.bmm(queries.view(len(keys), -1, keys.shape[2]), keys.transpose(1, 2)).softmax(-1)
        out[span] = torch.bmm(scores, values).view(queries.shape)

    in_threads(compute, len(q), q.shape[1:4].numel() * k.shape[2])


def whole_attention_native(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, spec: AttentionSpec, part: slice | None = None, *, narrow: bool = False
) -> Tensor:
    """:func:`whole_attention` on a CPU in float32, without gradients. ``part``: the tokens that q has; k and v have all."""
    part = slice(0, len(k)) if part is None else part
    work = work_of(tuple(layout.runs), part.start, part.stop, *q.shape[1:], k.shape[1])
    reach = reach_of(spec)
    return native_attention(q, k, v, work, reach, reach, spec, narrow=narrow)


@lru_cache(16)
def work_of(runs: tuple[Run, ...], begin: int, end: int, heads: int, size: int, kv_heads: int) -> Work:
    """All layers of a step share it. It is that of the tokens from ``begin`` to ``end``, whose first query is in row 0."""
    pieces = []
    for run in runs:
        for start in range(run.start, run.start + run.sequences * run.length, run.length):
            first, last = max(start, begin), min(start + run.length, end)
            if first < last:
                pieces.append(Piece(first - begin, last - first, np.arange(start, start + run.keys), first - start))
    return plan(pieces, heads, kv_heads, size, causal=False)


def whole_attention_triton(q: Tensor, k: Tensor, v: Tensor, layout: Layout, spec: AttentionSpec) -> Tensor:
    """:func:`whole_attention` on a GPU. Raises ValueError for other shapes, dtypes, devices or strides."""
    expect_device("q", q)
    expect("q", q, q, q.shape, FLOATS, dense_axes=2)
    expect("k", k, q, (len(q), k.shape[1], q.shape[2]), (q.dtype,), dense_axes=2)
    expect("v", v, q, k.shape, (q.dtype,), dense_axes=2)
    expect("layout.blocks", layout.blocks, q, (len(layout.blocks), 4), (torch.int32,))
    heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    width = max(16, power_of_two(head_dim))
    reach = 0 if spec.window is None else spec.window // 2
    _attend[(len(layout.blocks), heads)](
        q, k, v, out, layout.blocks, LOG2E * spec.scale_of(head_dim), LOG2E * spec.soft_cap, reach,
        q.stride(0), k.stride(0), v.stride(0), heads, heads // k.shape[1], head_dim, width, ROWS, block_keys(width, q.dtype),
        precision(q.dtype), spec.soft_cap != NO_CAP, spec.window is not None,
        num_warps=8 if width == 256 else 4, num_stages=2,
    )  # fmt: skip
    return out


@jit("reach")
def _attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    reach: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    """Each program computes one block of queries and one head."""
    block = blocks + tl.program_id(0) * 4
    head = tl.program_id(1)
    start = tl.load(block).to(tl.int64)
    length = tl.load(block + 1)
    keys_end = tl.load(block + 2)
    query = tl.load(block + 3) + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    real, within = (query < length)[:, None], (column < HEAD_DIM)[None, :]
    q_cell = (start + query)[:, None] * q_stride + head * HEAD_DIM + column[None, :]
    rows = tl.load(q + q_cell, mask=real & within, other=0.0)

    begin, end = 0, keys_end
    if WINDOWED:
        begin = tl.maximum(begin, tl.load(block + 3) - reach)
        end = tl.minimum(end, tl.load(block + 3) + ROWS + reach)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    kv_column = head // GROUP * HEAD_DIM + column[None, :]
    for first in range(begin, end, KEYS):
        place = first + tl.arange(0, KEYS)
        there = (place < end)[:, None] & within
        token = (start + place)[:, None]
        keys = tl.load(k + token * k_stride + kv_column, mask=there, other=0.0)
        values = tl.load(v + token * v_stride + kv_column, mask=there, other=0.0)
        seen = (place < end)[None, :]
        if WINDOWED:
            apart = place[None, :] - query[:, None]
            seen = seen & (apart <= reach) & (apart >= -reach)
        peak, total, acc = attend_block(rows, keys, values, seen, scale, cap, peak, total, acc, PRECISION, CAPPED)

    total = tl.where(total > 0, total, 1.0)  # rows beyond the sequence may see no key
    cell = ((start + query)[:, None] * HEADS + head) * HEAD_DIM + column[None, :]
    tl.store(out + cell, (acc / total[:, None]).to(out.dtype.element_ty), mask=real & within)
