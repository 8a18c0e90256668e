"""Thresholds at which top-k, top-p and min-p cut off a row's logits, one number for each row, without sorting the vocabulary.

Both cuts are the same question about the gaps ``peak - logit`` of a row: which is the largest g such that the tokens with a gap
below g are fewer than k, or have together less than p of the probability? The float32 gaps are not negative, so that their bits
as integers are in their order: the kernel finds g bit by bit, from a sum over the row at a few pivots a pass. At V = 151936 a row
is 608 kB: sixteen passes over it come out of the level-2 cache, where a sort would move it through memory several times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.row_chunks import row_chunks
from kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

FIRST_LOOK = 2048
"""Number of largest logits that usually suffices for top-p; a CPU takes ten times as long to sort a vocabulary of 150,000."""

BLOCK = 4096
PIVOTS = 4
"""Two bits of the answer a pass."""
INFINITY_BITS = tl.constexpr(0x7F800000)
LOG2_E = tl.constexpr(1.4426950408889634)


def scale(logits: Tensor, temperatures: Tensor) -> Tensor:
    """By temperature, with each row's largest at exactly 0, so that no temperature overflows. [rows, vocab], [rows], above 0."""
    return (logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)


def keep_thresholds(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, floors: Tensor) -> Tensor:
    """The smallest logit of each row, as :func:`scale` returns it, that top-k, then top-p over what it kept, and min-p keep.

    logits: [rows, vocab] float32; the others [rows]: temperatures float32; top_k int64, 0 for all; top_p float32, 1 for all;
    floors float32, the logarithm of min-p, -inf for all. -> [rows] float32. Tokens equal to the last one kept are kept. A row
    of temperature 0 is not filtered: its floor comes back.
    """
    operation = keep_thresholds_triton if launches(logits) else keep_thresholds_reference
    return operation(logits, temperatures, top_k, top_p, floors)


def keep_thresholds_reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, floors: Tensor) -> Tensor:
    """:func:`keep_thresholds` in plain PyTorch, for a CPU: it looks at values."""
    vocab = logits.shape[-1]
    widths = torch.where((top_k > 0) & (top_k < vocab), top_k, torch.where(top_p < 1, vocab, 0)) * (temperatures > 0)
    thresholds = floors.clone()
    # Rows of equal width at a time: the sums for a row's top-p must not depend on the widths of other rows.
    for width in sorted(set(widths.tolist()) - {0}):
        for rows in row_chunks((widths == width).nonzero().squeeze(1), vocab):
            found = _last_kept(logits[rows], width, temperatures[rows], top_p[rows])
            thresholds[rows] = torch.maximum(thresholds[rows], found)
    return thresholds


def _last_kept(logits: Tensor, width: int, temperatures: Tensor, top_p: Tensor) -> Tensor:
    """The smallest scaled logit that top-p keeps among the ``width`` largest. logits: [rows, vocab]. -> [rows]"""
    whole = width == logits.shape[-1]
    largest = scale(logits.topk(min(width, FIRST_LOOK) if whole else width).values, temperatures)
    if bool((top_p >= 1).all()):
        return largest[:, -1]
    # A sum of probabilities may round above 1, so a row with top-p 1 gets a limit that no sum reaches.
    limits = torch.where(top_p < 1, top_p, 2.0).unsqueeze(1)
    scaled = scale(logits, temperatures) if whole else largest
    total = scaled.logsumexp(-1, keepdim=True)
    if largest.shape[-1] < width and bool(((largest - total).exp().sum(-1, keepdim=True) < limits).any()):
        largest = scaled.sort(descending=True).values
    probabilities = (largest - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < limits).sum(-1, keepdim=True).clamp(min=1)
    return largest.gather(1, kept - 1).squeeze(1)


def keep_thresholds_triton(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, floors: Tensor) -> Tensor:
    """:func:`keep_thresholds` on a GPU, a program a row. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("logits", logits)
    rows, vocab = logits.shape
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("temperatures", temperatures, logits, (rows,), (torch.float32,))
    expect("top_k", top_k, logits, (rows,), (torch.int64,))
    expect("top_p", top_p, logits, (rows,), (torch.float32,))
    expect("floors", floors, logits, (rows,), (torch.float32,))
    out = torch.empty_like(floors)
    block = min(power_of_two(vocab), BLOCK)
    _keep_thresholds[(rows,)](logits, temperatures, top_k, top_p, floors, out, vocab, block, PIVOTS, num_warps=16)
    return out


@jit("temperatures", "top_k", "top_p", "floors")
def _keep_thresholds(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    floors: tl.tensor,
    out: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    threshold = tl.load(floors + row)
    by_k, by_p = (k > 0) & (k < VOCAB), p < 1
    if (temperature > 0) & (by_k | by_p):
        start = logits + row * VOCAB
        peak = _peak(start, VOCAB, BLOCK)
        rate = 1.0 / temperature * LOG2_E
        last = tl.full([], INFINITY_BITS, tl.int32)
        if by_k:
            last = _last_below(start, peak, rate, k.to(tl.float32), VOCAB, BLOCK, PIVOTS, False)
        if by_p:
            # Several tokens may equal the last one that top-k keeps; the total count is limited to k.
            equals = k.to(tl.float32) - _below(start, peak, rate, last, VOCAB, BLOCK, 1, False)
            total = _below(start, peak, rate, last, VOCAB, BLOCK, 1, True)
            total += equals * tl.exp2(-last.to(tl.float32, bitcast=True) * rate)
            limit = tl.sum(p * total, axis=0)
            last = tl.minimum(last, _last_below(start, peak, rate, limit, VOCAB, BLOCK, PIVOTS, True))
        threshold = tl.maximum(threshold, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))
    tl.store(out + row, threshold)


@jit()
def _peak(start: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The row's largest logit."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")))
    return tl.max(largest, axis=0)


@jit()
def _last_below(
    start: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    limit: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """Bits of the largest gap with less than ``limit`` below it. What is below a gap grows with it, and nothing is below 0."""
    found = tl.full([], 0, tl.int32)
    step = tl.full([], (1 << 31) // PIVOTS, tl.int32)
    # Invariant: the mass below `found` is less than the limit; the mass below `found` + PIVOTS · `step` is not.
    while step > 0:
        pivots = found + step * tl.arange(0, PIVOTS)
        under = _below(start, peak, rate, pivots, VOCAB, BLOCK, PIVOTS, WEIGHTED) < limit
        found += step * (tl.sum(under.to(tl.int32), axis=0) - 1)
        step = tl.where(step == 1, 0, tl.maximum(step // PIVOTS, 1))
    return found


@jit()
def _below(
    start: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    pivots: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """How many tokens, or with weights how much of ``exp(scaled)``, have a gap below each pivot's bits: [PIVOTS] float32."""
    sums = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logit = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf"))
        gap = tl.where(logit == peak, 0.0, peak - logit)  # correct also for an infinite peak
        weight = tl.exp2(-gap * rate) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
        below = gap.to(tl.int32, bitcast=True)[:, None] < pivots
        sums += tl.where(below, weight[:, None], 0.0)
    return tl.sum(sums, axis=0)
