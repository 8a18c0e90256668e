"""Log-probabilities of a prompt's own tokens, for as many of them as a step computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Copy, Download, Upload
from engine.models.modules import TokenHead
from engine.readouts.base import PromptPart, Readout, ReadoutContext, StepResult, StepTensors
from engine.readouts.logprobs import LogprobsCopy
from engine.requests.core import Branch
from engine.requests.generation import GenerateRequest
from kernels.largest import TokenLogprobs, token_logprobs
from kernels.row_chunks import CHUNK_ELEMENTS


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
