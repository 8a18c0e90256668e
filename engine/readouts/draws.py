"""The next token of each sequence without length guidance, and its log-probabilities where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from torch import Tensor

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.logit_edits import changes_logits
from engine.device.sampling import SamplingRow, draw_rows
from engine.device.sampling_rows import SamplingRows, pack
from engine.device.transfer import Download, Upload
from engine.ints import EMPTY, Ints
from engine.readouts.base import CheckedDraft, Drawn, Readout, ReadoutContext, StepResult, StepTensors
from engine.readouts.logprobs import LogprobsCopy
from engine.requests.core import Branch
from engine.requests.generation import GenerateRequest
from engine.structured.bits import Bits, bits_of, words_of
from kernels.largest import token_logprobs

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
        drawn = map(Drawn, self.branches, tokens, logprobs)
        result.drawn += self._accepted(list(drawn), result) if self._drafts else drawn

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
