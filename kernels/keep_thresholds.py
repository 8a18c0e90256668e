"""Thresholds at which top-k, top-p and min-p cut off a row's logits, one number for each row, without sorting the vocabulary.

On a GPU, one read of the logits (:mod:`kernels.largest`) suffices for top-k up to 64, also with top-p: the filters see the largest
logits only. For top-p alone, the same read leaves sums of probabilities above some edges. They give two edges between which the
sum reaches p; the tokens between them, of groups that have any, are collected, and a program for each row searches these few. At
V = 151936 a row is 608 kB, so 800 rows take 160 µs a read at 3 TB/s.

Other rows (larger top-k, so flat that the collected tokens have no room) are searched whole, with the same question for both
cuts about the gaps ``peak - logit``: which is the largest g such that the tokens with a gap below g are fewer than k, or have
together less than p of the probability? The float32 gaps are not negative, so that their bits as integers are in their order, and
the search finds g bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.largest import GROUP, MOST, STEP, STEPS, filters, largest_keys, logit_of, rate_of, row_sum, survey
from yardstick_llm.kernels.row_chunks import row_chunks
from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

FIRST_LOOK = 2048
"""Number of largest logits that usually suffices for top-p; a CPU takes ten times as long to sort a vocabulary of 150,000."""

BLOCK = 4096
PIVOTS = 4
"""Two bits of the answer a pass."""
ROOM = 384
"""Collected tokens of a split of a row at most: those of 38 splits, 16,384 with padding, fit the registers of a program."""
INFINITY_BITS = tl.constexpr(0x7F800000)
_MARGIN = tl.constexpr(2.0**-10)
"""Added to the edges of a bracket: gaps relative to a split's largest logit are rounded in another way than those to the row's."""
_DONE, _SEARCHED = tl.constexpr(0.0), tl.constexpr(-1.0)
"""In place of a bracket's upper edge: the threshold is known; the whole row is searched."""
_STEPS, _STEP, _GROUP = tl.constexpr(STEPS), tl.constexpr(STEP), tl.constexpr(GROUP)


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
    """:func:`keep_thresholds` on a GPU. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("logits", logits)
    rows, vocab = logits.shape
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("temperatures", temperatures, logits, (rows,), (torch.float32,))
    expect("top_k", top_k, logits, (rows,), (torch.int64,))
    expect("top_p", top_p, logits, (rows,), (torch.float32,))
    expect("floors", floors, logits, (rows,), (torch.float32,))
    # brackets: the lower edge, the upper edge (or _DONE, _SEARCHED) and the sum to reach.
    out, brackets = torch.empty_like(floors), logits.new_empty((rows, 3))
    seen = survey(logits, temperatures, top_k, top_p)
    groups, splits = seen.groups.shape[1], seen.peaks.shape[1]
    given = temperatures, top_k, top_p, floors, out, brackets
    _cut[(rows,)](logits, seen.groups, seen.parts, seen.peaks, seen.totals, seen.below, *given, vocab, **seen.sizes(MOST))
    gaps, above = logits.new_empty((rows, splits, ROOM)), logits.new_empty((rows, splits))
    counts = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _collect[(rows, splits)](
        logits, seen.groups, seen.peaks, temperatures, brackets, gaps, above, counts,
        vocab, splits, power_of_two(splits), groups // splits, ROOM, num_warps=8,
    )  # fmt: skip
    _select[(rows,)](
        gaps, above, counts, temperatures, floors, out, brackets,
        splits, power_of_two(splits), ROOM, power_of_two(splits * ROOM), num_warps=max(4, min(32, power_of_two(splits))),
    )  # fmt: skip
    _search[(rows,)](logits, *given, vocab, min(power_of_two(vocab), BLOCK), PIVOTS, num_warps=16)
    return out


@jit("parts", "totals", "temperatures", "top_k", "top_p", "floors")
def _cut(
    logits: tl.tensor,
    groups: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    below: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    floors: tl.tensor,
    out: tl.tensor,
    brackets: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The threshold of a row with a small top-k or without filters; the bracket of a row with top-p alone."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    rate = rate_of(temperature)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    by_k, by_p = filters(row, top_k, top_p, VOCAB)
    low, high, limit = tl.full([], 0.0, tl.float32), tl.full([], _DONE, tl.float32), tl.full([], 0.0, tl.float32)
    threshold = tl.load(floors + row)
    if (temperature > 0) & by_k:
        high = tl.where(k > WIDTH, _SEARCHED, _DONE)
        if k <= WIDTH:
            largest = largest_keys(row, logits, groups, parts, VOCAB, GROUPS, PARTS, PART, PART_BLOCK, WIDTH)
            last = _last_of_ranked(logit_of((largest >> 32).to(tl.int32)), k, p, rate, WIDTH)
            threshold = tl.maximum(threshold, -tl.div_rn(last, temperature))
    elif (temperature > 0) & by_p:
        _, total = row_sum(row, peaks, totals, rate, SPLITS, SPLIT_BLOCK)
        limit = p * total
        low, high = _bracket(row, peaks, below, rate, limit, SPLITS, SPLIT_BLOCK)
        high = tl.where((total > 0) & (total < float("inf")), high, _SEARCHED)
    tl.store(out + row, threshold)
    tl.store(brackets + row * 3, low)
    tl.store(brackets + row * 3 + 1, high)
    tl.store(brackets + row * 3 + 2, limit)


@jit()
def _last_of_ranked(logit: tl.tensor, k: tl.tensor, p: tl.tensor, rate: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """The gap of the last token that top-k, then top-p keep of ranked ones."""
    rank = tl.arange(0, WIDTH)
    peak = tl.max(logit, axis=0)
    gap = tl.where(logit == peak, 0.0, peak - logit)  # correct also for an infinite peak
    weight = tl.where(rank < k, tl.exp2(-gap * rate), 0.0)
    limit = tl.where(p < 1, p * tl.sum(weight, axis=0), float("inf"))
    kept = ((rank < k) & (tl.cumsum(weight, axis=0) - weight < limit)) | (rank == 0)
    return tl.max(tl.where(rank == tl.sum(kept.to(tl.int32), axis=0) - 1, gap, 0.0), axis=0)


@jit()
def _bracket(
    row: tl.tensor,
    peaks: tl.tensor,
    below: tl.tensor,
    rate: tl.tensor,
    limit: tl.tensor,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scaled gaps between which the sum of probabilities reaches ``limit``; the second is infinite where no edge is that far.

    The edges of a split are relative to its own largest logit. So at an edge of the row, the split's sum is between two of its own.
    """
    split, edge = tl.arange(0, SPLIT_BLOCK), tl.arange(0, _STEPS)
    of_split = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    behind = tl.where(of_split == float("-inf"), float("inf"), tl.max(of_split, axis=0) - of_split) * rate
    share = tl.exp2(-behind)[:, None]
    behind = tl.minimum(behind, 4.0 * _STEPS * _STEP)[:, None] / _STEP
    sums = below + (row * SPLITS + split[:, None]) * _STEPS
    here = (split < SPLITS)[:, None]
    most = tl.ceil(edge[None, :] - behind).to(tl.int32)
    at_most = tl.sum(share * tl.load(sums + most - 1, mask=here & (most > 0), other=0.0), axis=0)
    least = tl.floor(edge[None, :] + 1 - behind).to(tl.int32)
    at_least = tl.sum(share * tl.load(sums + least - 1, mask=here & (least > 0), other=0.0), axis=0)
    low = tl.max(tl.where(at_most < limit, edge.to(tl.float32), 0.0), axis=0)
    high = tl.min(tl.where(at_least >= limit, edge.to(tl.float32) + 1, float("inf")), axis=0)
    return low * _STEP - _MARGIN, high * _STEP + _MARGIN


@jit("temperatures", "above", "counts")
def _collect(
    logits: tl.tensor,
    groups: tl.tensor,
    peaks: tl.tensor,
    temperatures: tl.tensor,
    brackets: tl.tensor,
    gaps: tl.tensor,
    above: tl.tensor,
    counts: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """The gaps of a split's tokens in the bracket, as far as there is room, and the sum of probabilities of those above it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high = tl.load(brackets + row * 3 + 1)
    if high > _DONE:
        low, rate = tl.load(brackets + row * 3), rate_of(tl.load(temperatures + row))
        splits = tl.arange(0, SPLIT_BLOCK)
        peak = tl.max(tl.load(peaks + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf")), axis=0)
        place = row * SPLITS + split
        token = tl.arange(0, GROUPS * _GROUP)
        ids = split * (GROUPS * _GROUP) + token
        largest = logit_of(tl.load(groups + place * GROUPS + token // _GROUP))
        near = (peak - largest) * rate < high  # other groups are not read
        logit = tl.load(logits + row * VOCAB + ids, mask=near & (ids < VOCAB), other=float("-inf"))
        gap = peak - logit
        scaled = gap * rate
        inside = (scaled >= low) & (scaled < high)
        slot = tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(gaps + place * ROOM + slot, gap, mask=inside & (slot < ROOM))
        tl.store(counts + place, tl.sum(inside.to(tl.int32), axis=0))
        tl.store(above + place, tl.sum(tl.where(scaled < low, tl.exp2(-scaled), 0.0), axis=0))


@jit("temperatures", "floors", "above", "counts")
def _select(
    gaps: tl.tensor,
    above: tl.tensor,
    counts: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    out: tl.tensor,
    brackets: tl.tensor,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
) -> None:
    """The threshold of a row with a bracket, from its collected gaps, which stay in registers."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(brackets + row * 3 + 1) > _DONE:
        split = tl.arange(0, SPLIT_BLOCK)
        most = tl.max(tl.load(counts + row * SPLITS + split, mask=split < SPLITS, other=0), axis=0)
        if most > ROOM:
            tl.store(brackets + row * 3 + 1, _SEARCHED)
        else:
            temperature, limit = tl.load(temperatures + row), tl.load(brackets + row * 3 + 2)
            base = tl.sum(tl.load(above + row * SPLITS + split, mask=split < SPLITS, other=0.0), axis=0)
            slot = tl.arange(0, LIST_BLOCK)
            count = tl.load(counts + row * SPLITS + slot // ROOM, mask=slot < SPLITS * ROOM, other=0)
            filled = slot % ROOM < count
            gap = tl.load(gaps + row * (SPLITS * ROOM) + slot, mask=filled, other=float("inf"))
            weight = tl.exp2(-gap * rate_of(temperature))
            bits = gap.to(tl.int32, bitcast=True)
            nearest = tl.min(bits, axis=0)
            farthest = tl.max(tl.where(filled, bits, 0), axis=0)
            # The bits that all share need no search. Invariant: the sum below `found` is less than the limit.
            step = tl.full([], 1 << 30, tl.int32)
            while step > (nearest ^ farthest):
                step = step >> 1
            found = nearest & (-2 * step)
            while step > 0:
                pivot = found + step
                found = tl.where(base + tl.sum(tl.where(bits < pivot, weight, 0.0), axis=0) < limit, pivot, found)
                step = step >> 1
            # Sums in another order than the bracket's may round to the other side of the limit.
            last = tl.maximum(nearest, tl.minimum(farthest, found)).to(tl.float32, bitcast=True)
            tl.store(out + row, tl.maximum(tl.load(floors + row), -tl.div_rn(last, temperature)))


@jit("temperatures", "top_k", "top_p", "floors")
def _search(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    floors: tl.tensor,
    out: tl.tensor,
    brackets: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """The threshold of a row that the others leave, in sixteen passes over the row for each filter."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(brackets + row * 3 + 1) == _SEARCHED:
        temperature = tl.load(temperatures + row)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        by_k, by_p = filters(row, top_k, top_p, VOCAB)
        start = logits + row * VOCAB
        peak = _peak(start, VOCAB, BLOCK)
        rate = rate_of(temperature)
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
        threshold = -tl.div_rn(last.to(tl.float32, bitcast=True), temperature)
        tl.store(out + row, tl.maximum(tl.load(floors + row), threshold))


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
