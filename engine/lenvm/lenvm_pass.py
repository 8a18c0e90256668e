"""One forward pass of the length model: its input, its output, and its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import CandidatePass, ExtendSegment
from engine.device.transfer import Upload
from engine.lenvm.kept import Kept
from engine.models.decoder import FusedAttend, Heads
from engine.requests.images import shift_of


class LenVMPass(NamedTuple):
    """Input of one forward pass of the length model: segments, then one-token branches behind the known tokens of some rows, part
    by part (:mod:`engine.lenvm.parts`).
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
