"""The few tokens of a row that come into question, most probable first, chosen without a host trip or a sort of the vocabulary.

Every token has a 64-bit key that orders as (logit, lowest id first): so keys are distinct, and the largest of any set are the same
however it was split. Programs take the largest of a block each and its share of the softmax's denominator; one a row joins them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.keep_thresholds import scale
from kernels.row_chunks import row_chunks
from kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

MOST = 64
"""Candidates a row at most: what one program joins of 150,000 tokens still fits its registers."""

BLOCK = 4096
LARGEST_ID = 0x7FFFFFFF
"""Also the bits of a float32 but its sign: with these flipped, negative numbers order as integers do."""
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny

_LARGEST_ID = tl.constexpr(LARGEST_ID)
_SMALLEST_TEMPERATURE, _SMALLEST_KEY = tl.constexpr(SMALLEST_TEMPERATURE), tl.constexpr(-(1 << 63))


class Candidates(NamedTuple):
    """The ``width`` most probable tokens of each row, those that are kept first."""

    ids: Tensor
    """[rows, width] int64, by falling logit, equals by rising id; valid ids also beyond those kept."""
    probabilities: Tensor
    """[rows, width] float32: they sum to 1 over those kept, and are 0 beyond."""
    counts: Tensor
    """[rows] int64: how many are kept, at least 1."""


def candidates(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> Candidates:
    """The tokens that top-k, then top-p, then min-p keep, at most ``width`` of a row, a power of two from 2 to :data:`MOST`.

    logits: [rows, vocab] float32; the others [rows]: temperatures, top_p, min_p float32, top_k int64. The filters see p, the
    softmax of ``logits / temperature`` over the full vocabulary, never renormalised between them: the token of rank j is kept
    while j < top_k, the probability before it is at most top_p (always where top_p is 1), and p_j >= p_0 · min_p. Rank 0 is
    always kept; a token without any probability never else. At temperature 0 the most probable token is the only one.
    """
    operation = candidates_triton if launches(logits) else candidates_reference
    return operation(logits, temperatures, top_k, top_p, min_p, width)


def candidates_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> Candidates:
    """:func:`candidates` in plain PyTorch."""
    _expect_width(width, logits.shape[-1])
    kept_of_row = torch.where(temperatures > 0, top_k, 1).unsqueeze(1)
    temperatures = temperatures.clamp(min=SMALLEST_TEMPERATURE)
    columns = row_chunks(temperatures, logits.shape[-1])
    parts = [_most_probable(part, column, width) for part, column in zip(row_chunks(logits), columns, strict=True)]
    ids, p = (torch.cat(column) for column in zip(*parts, strict=True))
    rank = torch.arange(width, device=logits.device)
    before = p.cumsum(-1) - p
    by_p = before <= torch.where(top_p < 1, top_p, float("inf")).unsqueeze(1)
    kept = (rank < kept_of_row) & by_p & (p >= p[:, :1] * min_p.unsqueeze(1)) & (p > 0) | (rank == 0)
    p = p.where(kept, 0.0)
    return Candidates(ids, p / p.sum(-1, keepdim=True), kept.sum(-1))


def _most_probable(logits: Tensor, temperatures: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ids of the ``width`` largest logits, and their probabilities, 1 for the first where all are excluded: [rows, width] each."""
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 turns -0 into 0
    order = (bits ^ (bits >> 31 & LARGEST_ID)).long() << 32
    keys = order + (LARGEST_ID - torch.arange(logits.shape[-1], device=logits.device))
    ids = LARGEST_ID - (keys.topk(width).values & LARGEST_ID)
    scaled = scale(logits, temperatures)
    p = (scaled.gather(1, ids) - scaled.logsumexp(-1, keepdim=True)).exp()
    p[:, :1].nan_to_num_(1.0)
    return ids, p


def candidates_triton(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> Candidates:
    """:func:`candidates` on a GPU. All contiguous. Raises ValueError for other shapes, dtypes, devices or widths."""
    expect_device("logits", logits)
    rows, vocab = logits.shape
    _expect_width(width, vocab)
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("top_k", top_k, logits, (rows,), (torch.int64,))
    for name, values in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p)):
        expect(name, values, logits, (rows,), (torch.float32,))
    block = max(width, min(power_of_two(vocab), BLOCK))
    splits = -(-vocab // block)
    keys = torch.empty((rows, splits, width), dtype=torch.int64, device=logits.device)
    peaks, totals = logits.new_empty((2, rows, splits))
    _largest_of_split[(rows, splits)](logits, temperatures, keys, peaks, totals, vocab, splits, width, block, num_warps=8)
    found = Candidates(keys.new_empty((rows, width)), logits.new_empty((rows, width)), keys.new_empty(rows))
    _join_and_filter[(rows,)](
        keys, peaks, totals, temperatures, top_k, top_p, min_p, *found,
        splits, width, power_of_two(splits * width), power_of_two(splits), num_warps=8,
    )  # fmt: skip
    return found


def _expect_width(width: int, vocab: int) -> None:
    if not 2 <= width <= min(MOST, vocab) or width != power_of_two(width):
        raise ValueError(
            f"width is {width}, where a power of two from 2 to {MOST}, and at most the vocabulary's {vocab}, is expected"
        )


@jit("temperatures", "peaks", "totals")
def _largest_of_split(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the WIDTH largest keys of BLOCK tokens of a row, the largest logit, and the sum of ``exp(scaled)`` relative to it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.maximum(tl.load(temperatures + row), _SMALLEST_TEMPERATURE)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")) + 0.0  # turns -0 into 0
    bits = logit.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & _LARGEST_ID)).to(tl.int64) << 32
    place = row * SPLITS + split
    largest = tl.topk(order | (ids ^ _LARGEST_ID).to(tl.int64), WIDTH)
    tl.store(keys + place * WIDTH + tl.arange(0, WIDTH), largest)
    peak = tl.max(logit, axis=0)
    gap = tl.where(logit > float("-inf"), peak - logit, float("inf"))
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(-tl.div_rn(gap, temperature)), axis=0))


@jit("peaks", "totals", "temperatures", "top_k", "top_p", "min_p")
def _join_and_filter(
    keys: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    ids: tl.tensor,
    probabilities: tl.tensor,
    counts: tl.tensor,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
) -> None:
    """Each program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k = tl.where(temperature > 0, tl.load(top_k + row), 1)
    temperature = tl.maximum(temperature, _SMALLEST_TEMPERATURE)
    split = tl.arange(0, SPLIT_BLOCK)
    of_split = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(of_split, axis=0)
    gap = tl.where(of_split > float("-inf"), peak - of_split, float("inf"))
    shares = tl.load(totals + row * SPLITS + split, mask=split < SPLITS, other=0.0)
    total = tl.sum(shares * tl.exp(-tl.div_rn(gap, temperature)), axis=0)

    key = tl.arange(0, KEY_BLOCK)
    largest = tl.topk(tl.load(keys + row * (SPLITS * WIDTH) + key, mask=key < SPLITS * WIDTH, other=_SMALLEST_KEY), WIDTH)
    order = (largest >> 32).to(tl.int32)
    logit = (order ^ ((order >> 31) & _LARGEST_ID)).to(tl.float32, bitcast=True)
    rank = tl.arange(0, WIDTH)
    gap = tl.where(logit > float("-inf"), peak - logit, float("inf"))
    weight = tl.exp(-tl.div_rn(gap, temperature))
    p = tl.where(total > 0, weight / tl.maximum(total, 1.0), tl.where(rank == 0, 1.0, 0.0))

    before = tl.cumsum(p, axis=0) - p
    limit = tl.load(top_p + row)
    by_p = before <= tl.where(limit < 1, limit, float("inf"))
    kept = ((rank < k) & by_p & (p >= tl.max(p, axis=0) * tl.load(min_p + row)) & (p > 0)) | (rank == 0)
    p = tl.where(kept, p, 0.0)
    place = row * WIDTH + rank
    tl.store(ids + place, (largest & _LARGEST_ID) ^ _LARGEST_ID)
    tl.store(probabilities + place, p / tl.sum(p, axis=0))
    tl.store(counts + row, tl.sum(kept.to(tl.int64), axis=0))
