"""Readouts of generations: drawn tokens, guided or not, and log-probabilities of drawn tokens and of the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, Bits, Ints, bits_of, words_of
from yardstick_llm.engine.models.modules import TokenHead
from yardstick_llm.engine.models.transfer import Copy, Download, Upload
from yardstick_llm.engine.requests.batch import Batch, CandidatePass, ExtendSegment
from yardstick_llm.engine.requests.core import Branch
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.runner.lenvm.draws import GuidedDraws, GuidedRows, pack_guidance
from yardstick_llm.engine.runner.readouts.base import (
    CheckedDraft,
    Drawn,
    PromptPart,
    Readout,
    ReadoutContext,
    StepResult,
    StepTensors,
)
from yardstick_llm.engine.runner.sampling import SamplingRow, SamplingRows, changes_logits, draw_rows, pack
from yardstick_llm.kernels.largest import TokenLogprobs, token_logprobs
from yardstick_llm.kernels.row_chunks import CHUNK_ELEMENTS


class LogprobsCopy:
    """Token log-probabilities on their way to the host."""

    def __init__(self, download: Download, logprobs: TokenLogprobs) -> None:
        self._chosen = download.add(logprobs.chosen)
        self._top_tokens = download.add(logprobs.top_tokens)
        self._top = download.add(logprobs.top)

    def read(self, counts: Sequence[int]) -> list[wire.Logprobs]:
        """One message for each row. counts: alternatives of each row."""
        columns = (copy.tensor.tolist() for copy in (self._chosen, self._top_tokens, self._top))
        rows = zip(*columns, counts, strict=True)
        return [wire.Logprobs([chosen], [ids[:count]], [top[:count]]) for chosen, ids, top, count in rows]


def join_logprobs(pieces: Sequence[wire.Logprobs]) -> wire.Logprobs:
    """Log-probabilities of consecutive tokens as one message."""
    return wire.Logprobs(
        [value for piece in pieces for value in piece.chosen],
        [ids for piece in pieces for ids in piece.top_tokens],
        [values for piece in pieces for values in piece.top],
        [values for piece in pieces for values in piece.values],
    )


_FORCED = wire.Sampling(temperature=0)
"""Parameters of a draw that has one choice."""


class DrawReadout(Readout):
    """Draws that depend on the main model alone. Also ends sequences whose ``max_tokens`` is 0."""

    kind = wire.Generate

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._sampling_rows = SamplingRows()
        self._reported: dict[int, wire.Generate] = {}
        """Places of the draws whose log-probabilities are asked for, and their messages."""
        self._drafts: dict[int, Ints] = {}
        """Drafts by the place of the first of their draws. A draft of k tokens has k + 1 draws, each behind one token more."""

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, GenerateRequest)
        if branch in self.batch.candidate_passes or not segment.completes:
            return
        position = request.offset(branch)
        if position >= request.message.sampling.max_tokens:
            self.ended.append(branch)
            return
        draft = branch.draft
        if draft.size:
            self._drafts[len(self.branches)] = draft
        row += segment.tokens.size - 1 - draft.size
        for ahead in range(draft.size + 1):
            if request.message.logprobs is not None:
                self._reported[len(self.branches)] = request.message
            self.branches.append(branch)
            self.logit_rows.append(row + ahead)
            add_draw(self._sampling_rows, branch, request, position + ahead, self.context.eos_token_ids, draft[:ahead])

    def upload(self, upload: Upload) -> None:
        self._reported_copy = upload.add(list(self._reported))

    def queue(self, step: StepTensors, download: Download) -> None:
        if not self.branches:
            return
        logits = step.logits[self]
        self._spoilt = download.add(logits[:, 0].isnan().long())  # a hidden state that is no number spoils all logits
        reported = self._unedited(logits) if self._reported else None
        self.tokens = draw_rows(logits, self._sampling_rows, in_place=True)
        self._token_copy = download.add(self.tokens)
        if reported is not None:
            self._counts = [message.logprobs or 0 for message in self._reported.values()]
            chosen = self.tokens.index_select(0, self._reported_copy.tensor)
            self._logprobs = LogprobsCopy(download, token_logprobs(reported, chosen, max(self._counts)))

    def _unedited(self, logits: Tensor) -> Tensor:
        """The logits of reported rows, in a copy unless the draw leaves all as they are."""
        if len(self._reported) == len(logits) and not self._sampling_rows.special:
            return logits
        return logits.index_select(0, self._reported_copy.tensor)

    def read(self, result: StepResult) -> None:
        result.drawn += [Drawn(branch, None) for branch in self.ended]
        if not self.branches:
            return
        logprobs: list[wire.Logprobs | None] = [None] * len(self.branches)
        if self._reported:
            for (place, message), reported in zip(self._reported.items(), self._logprobs.read(self._counts), strict=True):
                logprobs[place] = _with_values(reported, message)
        tokens: list[int] = self._token_copy.tensor.tolist()
        drawn = [
            Drawn(branch, token, reported, spoilt=bool(spoilt))
            for branch, token, reported, spoilt in zip(self.branches, tokens, logprobs, self._spoilt.tensor.tolist(), strict=True)
        ]
        result.drawn += self._accepted(drawn, result) if self._drafts else drawn

    def _accepted(self, drawn: list[Drawn], result: StepResult) -> Iterator[Drawn]:
        """Yield the draws up to the first of each draft that differs from it; notes in ``result`` how many did not."""
        place = 0
        while place < len(drawn):
            draft = self._drafts.get(place, EMPTY).tolist()
            count = next((at for at, token in enumerate(draft) if drawn[place + at].token != token), len(draft))
            if draft:
                result.drafts.append(CheckedDraft(drawn[place].branch, len(draft), count))
            yield from (msgspec.structs.replace(each, more=True) for each in drawn[place : place + count])
            yield drawn[place + count]
            place += len(draft) + 1


def _with_values(logprobs: wire.Logprobs, message: wire.Generate) -> wire.Logprobs:
    """Add the values that a guided draw of ``message`` would have, where other draws of its output are guided."""
    guidance = message.length_guidance
    if guidance is None or not guidance.return_values:
        return logprobs
    if guidance.applies_to == "both" and message.thinking_limit is None:  # guidance has no effect on any draw
        return logprobs
    return msgspec.structs.replace(logprobs, values=[[None] * len(ranks) for ranks in logprobs.top_tokens])


def add_draw(
    rows: SamplingRows, branch: Branch, request: GenerateRequest, position: int, eos_token_ids: tuple[int, ...], ahead: Ints = EMPTY
) -> None:
    """Add the parameters of a draw of ``branch``, behind its tokens and those of its draft in ``ahead``. position:
    :meth:`GenerateRequest.offset` plus these."""
    if not branch.packed_sampling:
        branch.packed_sampling = pack(request.message.sampling, request.message.index + branch.index)
        plain = branch.constraint is None and branch.thinking is None and request.allowed is None
        branch.plain_sampling = plain and not changes_logits(request.message.sampling)
    if branch.plain_sampling:
        rows.add_plain(branch.packed_sampling, position)
        return
    forced = None if branch.thinking is None else request.forced_token(branch)
    if forced is not None and _allows(branch, forced):
        rows.add(_row(branch, request, position, eos_token_ids, _FORCED, bits_of([forced], words_of(forced + 1))))
        return
    row = _row(branch, request, position, eos_token_ids, request.message.sampling, _bits(branch, request), ahead)
    rows.add(row, branch.packed_sampling)


def _row(
    branch: Branch,
    request: GenerateRequest,
    position: int,
    eos_token_ids: tuple[int, ...],
    params: wire.Sampling,
    bits: Bits | None,
    ahead: Ints = EMPTY,
) -> SamplingRow:
    return SamplingRow(
        params,
        request.message.index + branch.index,
        position,
        request.prompt[: len(request.prompt) - request.message.resume_offset] if request.depends_on_output else EMPTY,
        np.concatenate([request.output(branch), ahead]) if request.depends_on_output else EMPTY,
        eos_token_ids,
        bits,
        branch.constraint is not None and branch.constraint.complete,
    )


def _allows(branch: Branch, token: int) -> bool:
    """Whether the grammar allows ``token``, which it does not within a character of several tokens."""
    return branch.constraint is None or bool(branch.constraint.mask[token >> 5] >> np.uint32(token & 31) & 1)


def _bits(branch: Branch, request: GenerateRequest) -> Bits | None:
    """Tokens that the grammar and ``allowed_token_ids`` allow next; None for all. Empty where they have no token in common."""
    if branch.constraint is None:
        return request.allowed
    bits = branch.constraint.mask
    if request.allowed is not None:
        common = min(len(bits), len(request.allowed))
        bits[:common] &= request.allowed[:common]
        bits[common:] = 0
    return bits


@dataclass(slots=True)
class _Part:
    """One segment of a prompt."""

    branch: Branch
    start: int
    """Position of the segment's first token in the prompt."""
    following: npt.NDArray[np.int64]
    """Tokens that the rows predict: row i predicts token i + 1. The last row of a prompt predicts output."""
    top: int
    """Alternatives of each token."""
    tokens: Copy | None = None
    logprobs: LogprobsCopy | None = None


class PromptLogprobsReadout(Readout):
    """The first token of a prompt has no log-probability, because nothing precedes it."""

    kind = wire.Generate

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[_Part] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, GenerateRequest)
        top = request.message.prompt_logprobs
        if top is None or branch.index != 0 or branch.drawn:
            return
        start = len(segment.context) - len(segment.tokens)
        following = request.prompt[start + 1 : start + len(segment.tokens) + 1].astype(np.int64)
        self._parts.append(_Part(branch, start, following, top))
        self.hidden_rows += range(row, row + len(following))

    def upload(self, upload: Upload) -> None:
        for part in self._parts:
            part.tokens = upload.add(part.following) if part.following.size else None

    def queue(self, step: StepTensors, download: Download) -> None:
        rows = torch.split(step.hidden[self], [len(part.following) for part in self._parts])
        for part, hidden in zip(self._parts, rows, strict=True):
            if part.tokens is not None:
                ((head, _),) = self.context.token_heads([part.branch])
                part.logprobs = LogprobsCopy(download, next_token_logprobs(head, hidden, part.tokens.tensor, part.top))

    def read(self, result: StepResult) -> None:
        for part in self._parts:
            first = [wire.Logprobs([None], [[]], [[]])] if part.start == 0 else []
            rest = [] if part.logprobs is None else part.logprobs.read([part.top] * len(part.following))
            result.prompts.append(PromptPart(part.branch, part.start + (part.start > 0), first + rest))


def next_token_logprobs(head: TokenHead, hidden: Tensor, tokens: Tensor, top_n: int) -> TokenLogprobs:
    """:func:`kernels.largest.token_logprobs` of the token after each hidden row, for a bounded number of rows at a time.

    hidden: [rows, hidden]; tokens: [rows] int64.
    """
    rows = max(1, CHUNK_ELEMENTS // len(head.weight))
    parts = [
        token_logprobs(head.logits(part), chosen, top_n)
        for part, chosen in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True)
    ]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


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
        rows.any_chosen |= guidance.chooses
        rows.any_end |= guidance.end_min_p is not None
        if guidance.constraint is not None:
            drawn, spelled = position - begin, (self.context.spellings, self.context.unit_tokens)
            aim = guidance if guidance.unit == "tokens" else request.in_tokens(branch, drawn, *spelled)
            rows.targets[place] = aim, drawn
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
        self._spoilt = download.add(step.logits[self][:, 0].isnan().long())
        if self._reported:
            top_n = max(message.logprobs or 0 for message in self._reported.values())
            self._candidates = top_candidates(download, draws, self._reported_copy.tensor, top_n)

    def read(self, result: StepResult) -> None:
        copies = (self._token_copy, self._undecided, self._counts, self._spoilt)
        tokens, undecided, counts, spoilt = (copy.tensor.tolist() for copy in copies)
        logprobs: list[wire.Logprobs | None] = [None] * len(self.branches)
        if self._reported:
            for place, reported in zip(self._reported, self._read_logprobs(counts), strict=True):
                logprobs[place] = reported
        drawn = zip(self.branches, tokens, logprobs, spoilt, strict=True)
        result.drawn += [Drawn(branch, token, reported, spoilt=bool(bad)) for branch, token, reported, bad in drawn]
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
