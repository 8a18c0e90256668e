"""The few tokens of a row that come into question, most probable first, chosen without a host trip or a sort of the vocabulary.

A read of the logits leaves maxima of groups and the softmax's denominator (:mod:`kernels.largest`). From these, a program for each
row finds the candidates and filters them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yardstick_llm.kernels.keep_thresholds import scale
from yardstick_llm.kernels.largest import (
    LARGEST_ID,
    SMALLEST_TEMPERATURE,
    expect_width,
    largest_keys,
    logit_of,
    place_of,
    rate_of,
    row_sum,
    survey,
)
from yardstick_llm.kernels.row_chunks import row_chunks
from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, tl

LEAST = torch.finfo(torch.float32).tiny
"""A smaller probability counts as none: float32 holds it with few bits, and a GPU's exponential makes it 0."""

_LEAST = tl.constexpr(LEAST)


class Candidates(NamedTuple):
    """The ``width`` most probable tokens of each row, those that are kept first."""

    ids: Tensor
    """[rows, width] int64, by falling logit, equals by rising id; valid ids also beyond those kept."""
    probabilities: Tensor
    """[rows, width] float32: they sum to 1 over those kept, and are 0 beyond."""
    counts: Tensor
    """[rows] int64: how many are kept, at least 1."""


def candidates(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> Candidates:
    """The tokens that top-k, then top-p, then min-p keep, at most ``width`` of a row.

    ``width``: a power of two from 2 to :data:`~kernels.largest.MOST`.

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
    expect_width(width, logits.shape[-1])
    kept_of_row = torch.where(temperatures > 0, top_k, 1).unsqueeze(1)
    temperatures = temperatures.clamp(min=SMALLEST_TEMPERATURE)
    columns = row_chunks(temperatures, logits.shape[-1])
    parts = [_most_probable(part, column, width) for part, column in zip(row_chunks(logits), columns, strict=True)]
    ids, p = (torch.cat(column) for column in zip(*parts, strict=True))
    rank = torch.arange(width, device=logits.device)
    before = p.cumsum(-1) - p
    by_p = before <= torch.where(top_p < 1, top_p, float("inf")).unsqueeze(1)
    kept = (rank < kept_of_row) & by_p & (p >= p[:, :1] * min_p.unsqueeze(1)) & (p >= LEAST) | (rank == 0)
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
    expect_width(width, vocab)
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("top_k", top_k, logits, (rows,), (torch.int64,))
    for name, values in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p)):
        expect(name, values, logits, (rows,), (torch.float32,))
    found = Candidates(
        torch.empty((rows, width), dtype=torch.int64, device=logits.device),
        logits.new_empty((rows, width)),
        torch.empty(rows, dtype=torch.int64, device=logits.device),
    )
    seen = survey(logits, temperatures)
    _join_and_filter[(rows,)](
        logits, seen.groups, seen.parts, seen.peaks, seen.totals, temperatures, top_k, top_p, min_p, *found,
        VOCAB=vocab, **seen.sizes(width),
    )  # fmt: skip
    return found


@jit("parts", "totals", "temperatures", "top_k", "top_p", "min_p")
def _join_and_filter(
    logits: tl.tensor,
    groups: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    ids: tl.tensor,
    probabilities: tl.tensor,
    counts: tl.tensor,
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
    temperature = tl.load(temperatures + row)
    rate = rate_of(temperature)
    k = tl.where(temperature > 0, tl.load(top_k + row), 1)
    peak, total = row_sum(row, peaks, totals, rate, SPLITS, SPLIT_BLOCK)
    largest = largest_keys(row, logits, groups, parts, VOCAB, GROUPS, PARTS, PART, PART_BLOCK, WIDTH)
    logit = logit_of((largest >> 32).to(tl.int32))
    rank = tl.arange(0, WIDTH)
    gap = tl.where(logit > float("-inf"), peak - logit, float("inf"))
    p = tl.where(total > 0, tl.exp2(-gap * rate) / tl.maximum(total, 1.0), tl.where(rank == 0, 1.0, 0.0))

    before = tl.cumsum(p, axis=0) - p
    limit = tl.load(top_p + row)
    by_p = before <= tl.where(limit < 1, limit, float("inf"))
    kept = ((rank < k) & by_p & (p >= tl.max(p, axis=0) * tl.load(min_p + row)) & (p >= _LEAST)) | (rank == 0)
    p = tl.where(kept, p, 0.0)
    place = row * WIDTH + rank
    tl.store(ids + place, place_of(largest).to(tl.int64))
    tl.store(probabilities + place, p / tl.sum(p, axis=0))
    tl.store(counts + row, tl.sum(kept.to(tl.int64), axis=0))
