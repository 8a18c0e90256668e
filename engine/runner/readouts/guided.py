"""The next token of each sequence with length guidance: the token, the distribution that it was drawn from, and length values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import wire
from engine.models.transfer import Copy, Download, Upload
from engine.requests.batch import Batch, CandidatePass, ExtendSegment
from engine.requests.core import Branch
from engine.requests.generation import GenerateRequest
from engine.runner.lenvm.draws import GuidedDraws, GuidedRows, pack_guidance
from engine.runner.readouts.base import Drawn, Readout, ReadoutContext, StepResult, StepTensors
from engine.runner.readouts.draws import add_draw


@dataclass(frozen=True, slots=True)
class _CandidatesCopy:
    """:func:`top_candidates` on their way to the host."""

    chosen: Copy
    ids: Copy
    top: Copy
    values: Copy


class GuidedDrawReadout(Readout):
    """Draws that the length model guides. :class:`~engine.runner.lenvm.draws.LenVMRunner` makes them from :attr:`rows`."""

    kind = wire.Generate

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._reported: dict[int, wire.Generate] = {}
        """Places of the draws whose log-probabilities are asked for, and their messages."""
        self.rows = GuidedRows()
        """[branches]"""
        self.skipped: list[CandidatePass] = []
        """Passes that were not computed, because the draw was decided without the length model. Known after :meth:`queue`."""

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, GenerateRequest)
        candidate_pass = self.batch.candidate_passes.get(branch)
        if candidate_pass is None or not segment.completes:
            return
        assert request.length_guidance is not None
        place, rows, guidance = len(self.branches), self.rows, request.length_guidance
        position, begin = request.offset(branch), request.guided_from(branch)
        assert begin is not None
        if request.message.logprobs is not None:
            self._reported[place] = request.message
        self.branches.append(branch)
        self.logit_rows.append(row + segment.tokens.size - 1)
        add_draw(rows.sampling, branch, request, position, self.context.eos_token_ids)
        rows.any_greedy |= request.message.sampling.temperature <= 0
        if guidance.constraint is not None:
            rows.targets[place] = guidance, position - begin
        request.packed_guidance = request.packed_guidance or pack_guidance(guidance)
        rows.packed.append(request.packed_guidance)
        rows.top_k.append(request.candidates)
        rows.ends.append(request.section_ends)
        rows.passes.append(candidate_pass)

    def upload(self, upload: Upload) -> None:
        self._reported_copy = upload.add(list(self._reported))

    def queue(self, step: StepTensors, download: Download) -> None:
        assert step.guided is not None
        draws = step.guided.draws
        assert draws is not None
        self.tokens = draws.tokens
        self.skipped, self._counted, self._needs = step.guided.skipped, step.guided.counted, step.guided.needs
        self._token_copy = download.add(draws.tokens)
        self._undecided = download.add(draws.undecided.long())
        self._counts = download.add(draws.counts)
        if self._reported:
            top_n = max(message.logprobs or 0 for message in self._reported.values())
            self._candidates = top_candidates(download, draws, self._reported_copy.tensor, top_n)

    def read(self, result: StepResult) -> None:
        tokens, undecided, counts = (copy.tensor.tolist() for copy in (self._token_copy, self._undecided, self._counts))
        logprobs: list[wire.Logprobs | None] = [None] * len(self.branches)
        if self._reported:
            for place, reported in zip(self._reported, self._read_logprobs(counts), strict=True):
                logprobs[place] = reported
        result.drawn += map(Drawn, self.branches, tokens, logprobs)
        skipped = set(self.skipped)
        needed = [count if used else 1 for count, used in zip(counts, undecided, strict=True)]
        self._needs.note(sum(needed), sum(self.rows.top_k))
        for candidate_pass, count in zip(self.rows.passes, needed if self._counted else counts, strict=True):
            if candidate_pass not in skipped:
                result.lenvm.tokens += count + (candidate_pass.pending.tokens.size if candidate_pass.pending else 0)
        result.lenvm.guided += sum(undecided)
        result.lenvm.alone += len(undecided) - sum(undecided)

    def _read_logprobs(self, counts: Sequence[int]) -> list[wire.Logprobs]:
        copies = self._candidates
        columns = (copy.tensor.tolist() for copy in (copies.chosen, copies.ids, copies.top, copies.values))
        rows = zip(*columns, self._reported.items(), strict=True)
        return [
            candidate_logprobs(chosen, ids, top, values, counts[place], message)
            for chosen, ids, top, values, (place, message) in rows
        ]


def top_candidates(download: Download, draws: GuidedDraws, rows: Tensor, top_n: int) -> _CandidatesCopy:
    """Queue the log-probability of the drawn token, and ids, log-probabilities and values of the most probable candidates.

    rows: [rows] int64, the draws to report. Copies are [rows] for the drawn token and [rows, at most top_n] for the candidates.
    """
    p = draws.probabilities.index_select(0, rows)
    ranked, order = p.sort(descending=True, stable=True)
    order = order[:, :top_n]
    ids, values = (table.index_select(0, rows).gather(1, order) for table in (draws.ids, draws.values))
    return _CandidatesCopy(
        chosen=download.add(draws.logprobs.index_select(0, rows)),
        ids=download.add(ids),
        top=download.add(torch.log(ranked[:, :top_n])),
        values=download.add(values),
    )


def candidate_logprobs(
    chosen: float, ids: list[int], top: list[float], values: list[float], count: int, message: wire.Generate
) -> wire.Logprobs:
    """Report of one draw among ``count`` candidates. Candidates with probability 0 are reported only with values."""
    valued = message.length_guidance is not None and message.length_guidance.return_values
    listed = min(message.logprobs or 0, count if valued else sum(value > -math.inf for value in top))
    read = [[None if math.isnan(value) else value for value in values[:listed]]] if valued else []
    return wire.Logprobs([chosen], [ids[:listed]], [top[:listed]], read)
