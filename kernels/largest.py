"""The largest logits of each row and the sum of their exponentials, from one read of the logits.

A program takes BLOCK logits of a row and stores the largest of each group of consecutive ones, and of each group of groups. The
``width`` largest logits of a row are in the ``width`` groups with the largest maxima, where equal maxima rank by their ids. So a
program for each row finds them from the maxima, and reads the logits of ``width`` groups only.

Logits and ids are ranked together, as 64-bit keys (logit, lowest id first): keys are distinct, so the result does not depend on
how a row is split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yardstick_llm.kernels.row_chunks import row_chunks
from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

MOST = 64
"""Largest logits of a row at most."""

WIDTHS = 8, 32
"""Most probable tokens that :func:`token_logprobs_triton` finds, and returns the first of. Each number is a kernel to compile."""

BLOCK = 4096
GROUP = 32
"""Consecutive logits of a group, and consecutive groups of a group of groups."""
STEPS = 16
STEP = 1.25
"""Number of edges of :attr:`Survey.below`, and the distance between two, as an exponent of two: all of them cover a factor of
1e6."""
LARGEST_ID = 0x7FFFFFFF
"""Also the bits of a float32 but its sign: with these flipped, negative numbers order as integers do."""
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny

_GROUP, _STEPS, _STEP = tl.constexpr(GROUP), tl.constexpr(STEPS), tl.constexpr(STEP)
_LARGEST_ID, _SMALLEST_ORDER = tl.constexpr(LARGEST_ID), tl.constexpr(-(1 << 31))
_SMALLEST_TEMPERATURE = tl.constexpr(SMALLEST_TEMPERATURE)
LOG2_E = tl.constexpr(1.4426950408889634)


class Survey(NamedTuple):
    """Results of one read of the logits. Each row is divided into splits of :data:`BLOCK` tokens."""

    groups: Tensor
    """[rows, splits · groups] int32: the order of the largest logit of each group."""
    parts: Tensor
    """[rows, splits · groups of groups] int32"""
    peaks: Tensor
    """[rows, splits] float32: the largest logit."""
    totals: Tensor
    """[rows, splits] float32: the sum of ``exp((logit - peak) / temperature)``."""
    below: Tensor | None
    """[rows, splits, STEPS] float32: the same sum over logits whose gap to the peak is below edge n, so that their summand is above
    ``2 ** (-STEP · n)``, for n from 1. None without filters."""

    def sizes(self, width: int) -> dict[str, int]:
        """Constants of a kernel with a program for each row that finds the ``width`` largest logits."""
        splits, groups, parts = (each.shape[1] for each in (self.peaks, self.groups, self.parts))
        part_block = max(power_of_two(parts), width)
        sizes = {"SPLITS": splits, "SPLIT_BLOCK": power_of_two(splits), "GROUPS": groups, "PARTS": parts, "PART": groups // parts}
        return sizes | {"PART_BLOCK": part_block, "WIDTH": width, "num_warps": 4 if width <= 16 else 8}


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token in each row, and of the most probable tokens."""

    chosen: Tensor
    """[rows] float32"""
    top_tokens: Tensor
    """[rows, top_n] int64, most probable first, equals by rising id"""
    top: Tensor
    """[rows, top_n] float32"""


def token_logprobs(logits: Tensor, chosen: Tensor, top_n: int) -> TokenLogprobs:
    """The model's own log-probabilities, at temperature 1, of the chosen tokens and of the ``top_n`` most probable ones.

    logits: [rows, vocab]; chosen: [rows] int64.
    """
    most = min(WIDTHS[-1], logits.shape[-1])
    fused = launches(logits) and logits.dtype == torch.float32 and logits.is_contiguous() and top_n <= most
    return token_logprobs_triton(logits, chosen, top_n) if fused else token_logprobs_reference(logits, chosen, top_n)


def token_logprobs_reference(logits: Tensor, chosen: Tensor, top_n: int) -> TokenLogprobs:
    """:func:`token_logprobs` in plain PyTorch. Equals have any order."""
    parts = []
    for part, ids in zip(row_chunks(logits), row_chunks(chosen, logits.shape[-1]), strict=True):
        part = part.float()
        total = part.logsumexp(-1, keepdim=True)
        top, top_ids = part.topk(top_n, dim=-1)
        parts.append(TokenLogprobs(part.gather(1, ids.unsqueeze(1)).squeeze(1) - total.squeeze(1), top_ids, top - total))
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def token_logprobs_triton(logits: Tensor, chosen: Tensor, top_n: int) -> TokenLogprobs:
    """:func:`token_logprobs` on a GPU, in one read of the logits. All contiguous.

    Raises ValueError for other shapes, dtypes or devices, and where ``top_n`` is more than all of :data:`WIDTHS` or the vocabulary.
    """
    expect_device("logits", logits)
    rows, vocab = logits.shape
    if top_n > min(WIDTHS[-1], vocab):
        raise ValueError(f"top_n is {top_n}, where at most {WIDTHS[-1]}, and the vocabulary's {vocab}, is expected")
    width = next(width for width in WIDTHS if width >= top_n)
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("chosen", chosen, logits, (rows,), (torch.int64,))
    found = TokenLogprobs(logits.new_empty(rows), chosen.new_empty((rows, top_n)), logits.new_empty((rows, top_n)))
    seen = survey(logits, None)
    _token_logprobs[(rows,)](
        logits, seen.groups, seen.parts, seen.peaks, seen.totals, chosen, *found, top_n, VOCAB=vocab, **seen.sizes(width)
    )
    return found


def survey(logits: Tensor, temperatures: Tensor | None, top_k: Tensor | None = None, top_p: Tensor | None = None) -> Survey:
    """Read the logits once. logits: [rows, vocab] float32; temperatures: [rows] float32, 1 where None.

    With ``top_k`` and ``top_p``, [rows] each, only rows that these filter are read; ``below`` is there for those with top-p alone.
    """
    rows, vocab = logits.shape
    block = min(max(power_of_two(vocab), GROUP), BLOCK)
    splits, groups = -(-vocab // block), block // GROUP
    parts = -(-groups // GROUP)
    orders = torch.empty(rows * splits * (groups + parts), dtype=torch.int32, device=logits.device)
    of_groups, of_parts = torch.split(orders, [rows * splits * groups, rows * splits * parts])
    peaks, totals = logits.new_empty((2, rows, splits))
    below = None if top_p is None else logits.new_empty((rows, splits, STEPS))
    _survey[(rows, splits)](
        logits, temperatures, top_k, top_p, of_groups, of_parts, peaks, totals, below,
        vocab, splits, block, groups // parts, num_warps=8,
    )  # fmt: skip
    return Survey(of_groups.view(rows, splits * groups), of_parts.view(rows, splits * parts), peaks, totals, below)


def expect_width(width: int, vocab: int) -> None:
    """Raise ValueError for a number of largest logits that is none."""
    if not 2 <= width <= min(MOST, vocab) or width != power_of_two(width):
        raise ValueError(
            f"width is {width}, where a power of two from 2 to {MOST}, and at most the vocabulary's {vocab}, is expected"
        )


@jit("temperatures", "top_k", "top_p", "parts", "totals")
def _survey(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    groups: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    below: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One split of a row. PART: groups of a group of groups."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    PARTS: tl.constexpr = GROUPS // PART
    rate = LOG2_E
    read = row >= 0
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        rate = rate_of(temperature)
    if below is not None:
        by_k, by_p = filters(row, top_k, top_p, VOCAB)
        read = (temperature > 0) & (by_k | by_p)
    if read:
        group = tl.arange(0, GROUPS)
        ids = split * BLOCK + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        logit = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")) + 0.0  # turns -0 into 0
        place = row * SPLITS + split
        of_group = tl.max(ordered(logit), axis=1)
        tl.store(groups + place * GROUPS + group, of_group)
        tl.store(parts + place * PARTS + tl.arange(0, PARTS), tl.max(tl.reshape(of_group, [PARTS, PART]), axis=1))
        logit = tl.reshape(logit, [BLOCK])  # one reduction in place of two
        peak = tl.max(logit, axis=0)
        gap = tl.where(logit == float("-inf"), float("inf"), peak - logit) * rate
        weight = tl.exp2(-gap)
        tl.store(peaks + place, peak)
        tl.store(totals + place, tl.sum(weight, axis=0))
        if below is not None:  # noqa: SIM102 - known when the kernel is compiled
            if by_p & (by_k == 0):
                for step in tl.static_range(1, _STEPS + 1):
                    tl.store(below + place * _STEPS + step - 1, tl.sum(tl.where(gap < step * _STEP, weight, 0.0), axis=0))


@jit()
def filters(row: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, VOCAB: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(whether top-k filters the row, whether top-p does)"""
    k = tl.load(top_k + row)
    return (k > 0) & (k < VOCAB), tl.load(top_p + row) < 1


@jit("parts", "totals", "chosen", "top_n")
def _token_logprobs(
    logits: tl.tensor,
    groups: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    chosen: tl.tensor,
    of_chosen: tl.tensor,
    top_tokens: tl.tensor,
    top: tl.tensor,
    top_n: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Each program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    peak, total = row_sum(row, peaks, totals, LOG2_E, SPLITS, SPLIT_BLOCK)
    log_total = tl.log(total)
    tl.store(of_chosen + row, tl.load(logits + row * VOCAB + tl.load(chosen + row)) - peak - log_total)
    if top_n > 0:
        largest = largest_keys(row, logits, groups, parts, VOCAB, GROUPS, PARTS, PART, PART_BLOCK, WIDTH)
        rank = tl.arange(0, WIDTH)
        cell = row * top_n + rank
        tl.store(top_tokens + cell, place_of(largest).to(tl.int64), mask=rank < top_n)
        tl.store(top + cell, logit_of((largest >> 32).to(tl.int32)) - peak - log_total, mask=rank < top_n)


@jit()
def ordered(logit: tl.tensor) -> tl.tensor:
    """int32 numbers in the order of the logits; :func:`logit_of` is the inverse."""
    bits = logit.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LARGEST_ID)


@jit()
def logit_of(order: tl.tensor) -> tl.tensor:
    """The logit that :func:`ordered` made ``order`` of."""
    return (order ^ ((order >> 31) & _LARGEST_ID)).to(tl.float32, bitcast=True)


@jit()
def rate_of(temperature: tl.tensor) -> tl.tensor:
    """Factor from a difference of logits to a power of two; finite also for temperature 0."""
    return tl.div_rn(1.0, tl.maximum(temperature, _SMALLEST_TEMPERATURE)) * LOG2_E


@jit()
def row_sum(
    row: tl.tensor, peaks: tl.tensor, totals: tl.tensor, rate: tl.tensor, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(the row's largest logit, the sum of ``exp((logit - peak) / temperature)``)"""
    split = tl.arange(0, SPLIT_BLOCK)
    of_split = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(of_split, axis=0)
    gap = tl.where(of_split > float("-inf"), peak - of_split, float("inf"))
    sums = tl.load(totals + row * SPLITS + split, mask=split < SPLITS, other=0.0)
    return peak, tl.sum(sums * tl.exp2(-gap * rate), axis=0)


@jit()
def largest_keys(
    row: tl.tensor,
    logits: tl.tensor,
    groups: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Keys of the row's WIDTH largest logits, largest first: [WIDTH] int64."""
    part = tl.arange(0, PART_BLOCK)
    order = tl.load(parts + row * PARTS + part, mask=part < PARTS, other=_SMALLEST_ORDER)
    part = place_of(tl.topk(key_of(order, part), WIDTH))
    group = tl.reshape(part[:, None] * PART + tl.arange(0, PART)[None, :], [WIDTH * PART])
    order = tl.load(groups + row * GROUPS + group, mask=group < GROUPS, other=_SMALLEST_ORDER)
    group = place_of(tl.topk(key_of(order, group), WIDTH))
    ids = tl.reshape(group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :], [WIDTH * _GROUP])
    logit = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")) + 0.0
    return tl.topk(key_of(ordered(logit), ids), WIDTH)


@jit()
def key_of(order: tl.tensor, place: tl.tensor) -> tl.tensor:
    """int64 keys that order as (order, lowest place first)."""
    return (order.to(tl.int64) << 32) | (place ^ _LARGEST_ID).to(tl.int64)


@jit()
def place_of(key: tl.tensor) -> tl.tensor:
    """The place in a key, int32."""
    return ((key & _LARGEST_ID) ^ _LARGEST_ID).to(tl.int32)
