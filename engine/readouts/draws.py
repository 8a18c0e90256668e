"""The next token of each sequence without length guidance, and its log-probabilities where they are asked for."""

from __future__ import annotations

import msgspec
import numpy as np

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.core import Branch, GenerateRequest
from engine.device.sampling import SamplingRow, draw, prepare, token_logprobs
from engine.device.transfer import Download, Upload
from engine.ints import EMPTY
from engine.readouts.base import Drawn, Readout, ReadoutContext, StepResult, StepTensors, wanted_rows
from engine.readouts.logprobs import LogprobsCopy
from engine.structured.bits import Bits, bits_of, words_of


class DrawReadout(Readout):
    """Draws that depend on the main model alone. Also ends sequences whose ``max_tokens`` is 0."""

    kind = wire.Generate

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._messages: list[wire.Generate] = []
        self._sampling_rows: list[SamplingRow] = []

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, GenerateRequest)
        if not segment.completes or branch in self.batch.candidate_passes:
            return
        if not request.draws(branch):
            self.ended.append(branch)
            return
        self.branches.append(branch)
        self.logit_rows.append(row + len(segment.tokens) - 1)
        self._messages.append(request.message)
        self._sampling_rows.append(sampling_row(branch, request, self.context.eos_token_ids))

    def upload(self, upload: Upload) -> None:
        self._wanted = wanted_rows(self._messages)
        self._wanted_copy = upload.add(self._wanted)

    def queue(self, step: StepTensors, download: Download) -> None:
        if not self.branches:
            return
        logits = step.logits[self]
        wanted = logits.index_select(0, self._wanted_copy.tensor) if self._wanted else None
        self.tokens = draw(logits, prepare(self._sampling_rows, logits.device), in_place=True)
        self._token_copy = download.add(self.tokens)
        if wanted is not None:
            self._counts = [self._messages[place].logprobs or 0 for place in self._wanted]
            chosen = self.tokens.index_select(0, self._wanted_copy.tensor)
            self._logprobs = LogprobsCopy(download, token_logprobs(wanted, chosen, max(self._counts)))

    def read(self, result: StepResult) -> None:
        result.ended += self.ended
        if not self.branches:
            return
        read = zip(self._wanted, self._logprobs.read(self._counts), strict=True) if self._wanted else ()
        logprobs = {place: _with_values(told, self._messages[place]) for place, told in read}
        tokens = enumerate(zip(self.branches, self._token_copy.tensor.tolist(), strict=True))
        result.drawn += [Drawn(branch, token, logprobs.get(place)) for place, (branch, token) in tokens]


def _with_values(told: wire.Logprobs, message: wire.Generate) -> wire.Logprobs:
    """Add the values that a guided draw of ``message`` would have, where other draws of its output are guided."""
    guidance = message.length_guidance
    if guidance is None or not guidance.return_values:
        return told
    if guidance.applies_to == "both" and message.thinking_limit is None:  # guidance has no effect on any draw
        return told
    return msgspec.structs.replace(told, values=[[None] * len(ranks) for ranks in told.top_tokens])


def sampling_row(branch: Branch, request: GenerateRequest, eos_token_ids: tuple[int, ...]) -> SamplingRow:
    """Parameters of the next draw of ``branch``."""
    bits, params = _bits(branch, request), request.message.sampling
    forced = request.forced_token(branch)
    if forced is not None and _allows(branch, forced):
        bits, params = bits_of([forced], words_of(forced + 1)), wire.Sampling(temperature=0)
    return SamplingRow(
        params=params,
        index=request.message.index + branch.index,
        position=request.offset(branch),
        prompt_tokens=request.prompt[: len(request.prompt) - request.message.resume_offset],
        output_tokens=request.output(branch) if request.depends_on_output else EMPTY,
        eos_ids=eos_token_ids,
        bits=bits,
        complete=branch.constraint is not None and branch.constraint.complete,
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
