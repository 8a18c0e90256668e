"""One pass between the fused projection and attention: QK-norm, rotation, and the write of keys and values to their slots.

Apart these are up to six launches a layer, and each reads and writes what the one before wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels import kv_codes
from yardstick_llm.kernels.quantize import FP8, MAX_CODE
from yardstick_llm.kernels.rms_norm import rms_norm_reference
from yardstick_llm.kernels.rope import rope
from yardstick_llm.kernels.row_chunks import in_threads
from yardstick_llm.kernels.runtime import (
    FLOATS,
    compiles,
    expect,
    expect_device,
    flat,
    jit,
    launches,
    loops,
    power_of_two,
    tl,
    warps,
)

_MAX_CODE = tl.constexpr(MAX_CODE)

TILE = 2048
"""Elements a program takes: 16 heads of 128."""


def qk_norm_rope_write(
    qkv: Tensor,
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
) -> Tensor:
    """Write the keys, normalised and rotated, and the values to their slots, and return the queries, normalised and rotated.

    qkv: [tokens, heads + 2 · kv_heads, head_dim], queries, keys and values in that order; q_weight, k_weight: [head_dim], of qkv's
    dtype or float32, None where the model has no QK-norm; cos, sin: [tokens, rotary / 2] float32, where ``rotary`` of the head_dim
    elements of a head are rotated, the first ones; keys, values: [slots, kv_heads, head_dim], one layer's; slots: [tokens] int64,
    each within keys and none twice. -> [tokens, heads, head_dim].

    scales: [2, kv_heads] float32, powers of two, of keys and of values that are kept as e4m3 codes (:mod:`kernels.kv_codes`); None
    where they are kept in the dtype of qkv. The queries are then multiplied by the scales of their keys.

    out: where the queries go, contiguous; None for a new tensor.
    """
    given = qkv, q_weight, k_weight, eps, cos, sin, keys, values, slots
    if launches(qkv, q_weight, k_weight):
        return qk_norm_rope_write_triton(*given, scales, out)
    plain = scales is None and out is None and keys.is_contiguous()
    if not (plain and compiles(qkv, q_weight, k_weight, cos, sin, keys, values)):
        return qk_norm_rope_write_reference(*given, scales, out)
    tokens, kv_heads, size = len(qkv), *keys.shape[1:]
    heads = qkv.shape[1] - 2 * kv_heads
    out = qkv.new_empty(tokens, heads, size)
    numbers = flat(qkv), flat(q_weight), flat(k_weight), eps, flat(cos), flat(sin), cos.shape[1], heads, kv_heads, size
    places, write = (flat(slots), flat(keys), flat(values), flat(out)), loops().norm_rotate_write
    in_threads(lambda span: write(*numbers, *places, span.start, min(span.stop, tokens)), tokens, 3 * qkv.shape[1:].numel())
    return out


def qk_norm_rope_write_reference(
    qkv: Tensor,
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
) -> Tensor:
    """:func:`qk_norm_rope_write` in plain PyTorch. On a CPU rounded once; on a GPU after the norm and after the rotation."""
    kv_heads = keys.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
    weights = None
    if q_weight is not None and k_weight is not None:
        weights = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
    q, k = torch.split(_ready(qk, weights, eps, cos, sin), [heads, kv_heads], dim=1)
    if scales is None:
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return q if out is None else out.copy_(q)
    kv_codes.write(keys, slots, kv_codes.encode(k, scales[0]))
    kv_codes.write(values, slots, kv_codes.encode(v, scales[1]))
    return torch.mul(q, scales[0].repeat_interleave(q.shape[1] // kv_heads)[:, None].to(q.dtype), out=out)


def _ready(qk: Tensor, weights: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys, [tokens, heads + kv_heads, head_dim], normalised and rotated; weights: [heads + kv_heads, head_dim]."""
    if qk.dtype == torch.float32 or qk.is_cuda:
        return rope(qk if weights is None else rms_norm_reference(qk, weights, eps), cos, sin)
    out = torch.empty_like(qk, memory_format=torch.contiguous_format)

    def rotate(span: slice) -> None:
        wide = qk[span].float()
        out[span] = rope(wide if weights is None else rms_norm_reference(wide, weights, eps), cos[span], sin[span])

    in_threads(rotate, len(qk), 3 * qk.shape[1:].numel())
    return out


def qk_norm_rope_write_triton(
    qkv: Tensor,
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
) -> Tensor:
    """:func:`qk_norm_rope_write` on a GPU, rounded once. All contiguous, and of one dtype but for cos, sin, slots, scales, codes.

    Raises ValueError for other shapes, dtypes, devices or layouts. Slots are not checked: that would wait for the GPU.
    """
    check_qk_norm_rope(qkv, q_weight, k_weight, cos, sin, keys, values, slots, scales)
    tokens, rows, head_dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = rows - 2 * kv_heads
    if out is not None:
        expect("out", out, qkv, (tokens, heads, head_dim), (qkv.dtype,))
    q = qkv.new_empty((tokens, heads, head_dim)) if out is None else out
    half = power_of_two(head_dim // 2)
    tile = min(power_of_two(rows), max(1, TILE // (2 * half)))
    grid = (tokens, -(-rows // tile))
    _qk_norm_rope_write[grid](
        qkv, q_weight, k_weight, eps, cos, sin, q, keys, values, slots, scales, heads, kv_heads, head_dim // 2, cos.shape[1], tile,
        half, num_warps=warps(2 * half * tile),
    )  # fmt: skip
    return q


def check_qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: Tensor | None,
    dense_axes: int | None = None,
) -> None:
    """Check the arguments of a kernel of this operation; dense_axes: of qkv, as in :func:`expect`. Raises ValueError."""
    expect_device("qkv", qkv)
    if qkv.dim() != 3 or keys.dim() != 3 or qkv.shape[1] <= 2 * keys.shape[1] or qkv.shape[2] % 2:
        raise ValueError(
            f"qkv and keys have shapes {list(qkv.shape)} and {list(keys.shape)}, where [tokens, heads + 2 · kv_heads, head_dim]"
            " and [slots, kv_heads, head_dim] are expected, head_dim even"
        )
    tokens, _, head_dim = qkv.shape
    expect("qkv", qkv, qkv, qkv.shape, FLOATS, dense_axes)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight are given both or not at all")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            expect(name, weight, qkv, (head_dim,), tuple({qkv.dtype: None, torch.float32: None}))
    if cos.shape[-1] > head_dim // 2:
        raise ValueError(f"cos has shape {list(cos.shape)}, where at most {head_dim // 2} angles are expected")
    expect("cos", cos, qkv, (tokens, cos.shape[-1]), (torch.float32,))
    expect("sin", sin, qkv, (tokens, cos.shape[-1]), (torch.float32,))
    kept = qkv.dtype if scales is None else FP8
    expect("keys", keys, qkv, (*keys.shape[:2], head_dim), (kept,))
    expect("values", values, qkv, keys.shape, (kept,))
    if scales is not None:
        expect("scales", scales, qkv, (2, keys.shape[1]), (torch.float32,))
    expect("slots", slots, qkv, (tokens,), (torch.int64,))


@jit("slots")
def _qk_norm_rope_write(
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
    scales: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """TILE rows of a token a program, whichever of queries, keys and values they are; each head in two halves.

    ROTATED pairs of elements are rotated. The rest of a head is halved too, and stays as it is.
    """
    token = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < HALF
    left, right = halves(columns, HALF, ROTATED)
    is_query, is_value = rows < HEADS, rows >= HEADS + KV_HEADS
    kept = (rows < HEADS + 2 * KV_HEADS) & inside
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + rows) * (2 * HALF)
    first = tl.load(start + left, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(start + right, mask=kept, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if q_weight is not None:
        q_first, q_second = _weights(q_weight, left, right, inside)
        k_first, k_second = _weights(k_weight, left, right, inside)
        squares = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = tl.rsqrt(squares + eps)[:, None]
        turned_first = first * scale * tl.where(is_query, q_first, k_first)
        turned_second = second * scale * tl.where(is_query, q_second, k_second)
    cosines, sines = cos + token * ROTATED + columns, sin + token * ROTATED + columns
    rotated_first, rotated_second = rotated(turned_first, turned_second, cosines, sines, columns < ROTATED)
    slot = tl.load(slots + token)
    if scales is not None:
        kv_head = tl.where(is_query, rows // (HEADS // KV_HEADS), rows - HEADS)
        factor = tl.load(scales + kv_head, mask=rows < HEADS + 2 * KV_HEADS, other=1.0)
        # Triton's "/" may be two units in the last place off; the reciprocal of a power of two is exact.
        factor = tl.where(is_query, factor, tl.div_rn(1.0, factor))
        first, second = bounded(first * factor), bounded(second * factor)
        rotated_first, rotated_second = rotated_first * factor, rotated_second * factor
        rotated_first = tl.where(is_query, rotated_first, bounded(rotated_first))
        rotated_second = tl.where(is_query, rotated_second, bounded(rotated_second))
    query = q + (token * HEADS + rows) * (2 * HALF)
    store_halves(query + left, query + right, rotated_first, rotated_second, kept & is_query)
    key = keys + (slot * KV_HEADS + rows - HEADS) * (2 * HALF)
    is_key = (rows >= HEADS) & (rows < HEADS + KV_HEADS)
    store_halves(key + left, key + right, rotated_first, rotated_second, kept & is_key)
    value = values + (slot * KV_HEADS + rows - HEADS - KV_HEADS) * (2 * HALF)
    store_halves(value + left, value + right, first, second, kept & is_value)


@jit()
def halves(columns: tl.tensor, HALF: tl.constexpr, ROTATED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Elements of a head that are turned together; of those behind the rotated ones, the first and the second half."""
    left, right = columns, columns + HALF
    if ROTATED < HALF:
        left = tl.where(columns < ROTATED, columns, columns + ROTATED)
        right = tl.where(columns < ROTATED, columns + ROTATED, columns + HALF)
    return left, right


@jit()
def rotated(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, turned: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Two halves of heads, rotated where ``turned``. cos, sin: pointers."""
    cosines = tl.load(cos, mask=turned, other=1.0)
    sines = tl.load(sin, mask=turned, other=0.0)
    return first * cosines - second * sines, second * cosines + first * sines


@jit()
def store_halves(left: tl.tensor, right: tl.tensor, first: tl.tensor, second: tl.tensor, kept: tl.tensor) -> None:
    """Round two halves of heads and write them. left, right: pointers."""
    tl.store(left, first.to(left.dtype.element_ty), mask=kept)
    tl.store(right, second.to(right.dtype.element_ty), mask=kept)


@jit()
def _weights(weight: tl.tensor, left: tl.tensor, right: tl.tensor, inside: tl.tensor) -> tl.tensor:
    first = tl.load(weight + left, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(weight + right, mask=inside, other=0.0).to(tl.float32)


@jit()
def bounded(x: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x, -_MAX_CODE), _MAX_CODE)
