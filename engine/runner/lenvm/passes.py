"""One forward pass of the length model: which candidates it computes, its attention, and the keys and values that it keeps.

A *part* is some candidates of one row, which the pass computes as one-token branches behind the row's text. On a GPU all parts have
the same width, so that one captured pass serves rows with any numbers of candidates: a row with more than that has several parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.models.transfer import Upload
from yardstick_llm.engine.requests.batch import CandidatePass, ExtendSegment
from yardstick_llm.engine.requests.images import shift_of
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.kernels.attention_layout import within
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write

WIDTHS = (5, 8)
"""Widths of parts on a GPU: the default ``top_k``, which nearly all requests use, and one that wastes less on many candidates."""

Longs = npt.NDArray[np.int64]


class Parts(NamedTuple):
    """Parts of the candidates in a table [rows, columns], in which a row's candidates come first."""

    rows: Longs
    """[parts] row of each part"""
    first: Longs
    """[parts] column of its first candidate"""
    branches: Longs
    """[parts] number of its candidates, beyond those that the row has included"""
    places: Longs
    """[branches of all parts] place of each in the flattened table"""
    branch_of: Longs
    """[rows, columns] branch that computes the candidate there, or the number of all branches where there is none"""


def equal_parts(most: Sequence[int], columns: int) -> Parts:
    """Parts of one of :data:`WIDTHS`, the one that computes fewest branches. most: candidates that each row has at most."""
    limits = np.array(most, np.int64)
    width = min(reversed(WIDTHS), key=lambda width: width * int((-(-limits // width)).sum()))
    parts = -(-limits // width)
    rows, first = np.repeat(np.arange(len(limits)), parts), within(parts) * width
    return _indexed(rows, first, np.full(len(rows), width), (len(limits), columns))


def exact_parts(counts: Longs, columns: int) -> Parts:
    """One part for each row with candidates that need a value. counts: number of these, 0 for rows that are decided."""
    rows = np.flatnonzero(counts)
    return _indexed(rows, np.zeros_like(rows), counts[rows], (len(counts), columns))


def _indexed(rows: Longs, first: Longs, branches: Longs, shape: tuple[int, int]) -> Parts:
    row, column = np.repeat(rows, branches), np.repeat(first, branches) + within(branches)
    inside = np.flatnonzero(column < shape[1])
    branch_of = np.full(shape, len(column), np.int64)
    branch_of[row[inside], column[inside]] = inside
    return Parts(rows, first, branches, row * shape[1] + np.minimum(column, shape[1] - 1), branch_of)


class Kept(NamedTuple):
    """[layers, candidates, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def room(cls, kv: KVCache, candidates: int) -> Kept:
        """Allocate uninitialised keys and values for ``candidates`` tokens, in the format of ``kv``."""
        layers, _, *shape = kv.keys.shape
        return cls(*(kv.keys.new_empty(layers, candidates, *shape) for _ in range(2)))

    def first(self, candidates: int) -> Kept:
        """Views of the first ``candidates`` tokens."""
        return Kept(self.keys[:, :candidates], self.values[:, :candidates])

    def attend(self, branches: PlainAttend) -> FusedAttend:
        """Attention that writes the branches' keys and values here, in the kernel that normalises and rotates them."""
        places = torch.arange(self.keys.shape[1], device=self.keys.device)

        def attend(layer: int, heads: Heads) -> Tensor:
            assert heads.write is None, "the length model projects before it attends"
            keys, values = self.keys[layer], self.values[layer]
            q = qk_norm_rope_write(heads.qkv, heads.q_weight, heads.k_weight, heads.eps, heads.cos, heads.sin, keys, values, places)
            return branches(layer, q, keys, values)

        return FusedAttend(attend)

    def adopt(self, chosen: Tensor, kv: KVCache, slots: Tensor) -> None:
        """Write the candidates ``chosen`` to ``slots`` of ``kv``, [rows] int64 both."""
        kv.keys.index_copy_(1, slots, self.keys.index_select(1, chosen))
        kv.values.index_copy_(1, slots, self.values.index_select(1, chosen))


class LenVMPass(NamedTuple):
    """Input of one forward pass of the length model: segments, then one-token branches behind the known tokens of some rows, part
    by part (:mod:`engine.runner.lenvm.passes`).
    """

    segments: Sequence[ExtendSegment]
    valued: Sequence[int]
    """Indices of the ``segments`` whose last token is valued."""
    passes: Sequence[CandidatePass]
    """[parts]: that of each part's row"""
    branches: Sequence[int]
    """[parts]: number of branches of each"""
    tokens: Tensor
    """[branches] int64"""
    counts: Tensor
    """[parts] int64: number of real branches of each, which come first"""


class LenVMOutput(NamedTuple):
    """Output of one forward pass of the length model."""

    branches: Tensor | None
    """[branches] float32, raw: of the one-token branches"""
    ends: Tensor | None
    """[valued segments] float32, raw values of their last tokens"""
    kept: Kept | None
    """Keys and values of the branches"""


class PassAttention:
    """Attention of one pass: first segments over their slots, then branches over their prefixes, which the segments of the pass
    have filled.
    """

    def __init__(self, attention: AttentionBackend, work: LenVMPass) -> None:
        self.kept = Kept.room(attention.kv, sum(work.branches)) if work.passes else None
        self._split = sum(len(segment.tokens) for segment in work.segments)
        self._segments: FusedAttend | None = attention.plan(work.segments) if work.segments else None
        self._branches: FusedAttend | None = None
        if self.kept is not None:
            prefixes = [candidate_pass.prefix for candidate_pass in work.passes]
            self._branches = self.kept.attend(attention.plan_branches(prefixes, work.branches, work.counts))

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        if self._branches is None:
            assert self._segments is not None
            return self._segments.attend(layer, heads)
        if self._segments is None:
            return self._branches.attend(layer, heads)
        segments, branches = (_some(heads, part) for part in (slice(None, self._split), slice(self._split, None)))
        return torch.cat([self._segments.attend(layer, segments), self._branches.attend(layer, branches)])


def position_of(candidate_pass: CandidatePass) -> int:
    """Position of the candidates of a pass: behind images, less than the number of tokens before them."""
    return candidate_pass.prefix.size + shift_of(candidate_pass.branch)


def shifts_of(passes: Sequence[CandidatePass], device: torch.device) -> Tensor:
    """:func:`position_of` each of ``passes`` less the number of tokens before it, [passes] int64."""
    upload = Upload()
    shifts = upload.add([shift_of(candidate_pass.branch) for candidate_pass in passes])
    upload.send(device)
    return shifts.tensor


def _some(heads: Heads, tokens: slice) -> Heads:
    """Heads of a slice of the tokens."""
    return replace(heads, qkv=heads.qkv[tokens], cos=heads.cos[tokens], sin=heads.sin[tokens])
