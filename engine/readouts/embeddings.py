"""Pooled hidden states: of the last token, or the mean over the prompt, for as much of it as a step computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Download
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from engine.requests.core import Branch, PartialRow, ScoringRequest

SMALLEST_NORM = 1e-12
"""Lower bound of the divisor of a normalisation, as in sentence-transformers."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One segment of a branch or, where the last token is pooled, that token."""

    branch: Branch
    readout: wire.Embedding
    start: int
    """Place of its first token among the pooled ones of its branch."""
    tokens: int
    completes: bool


class EmbeddingReadout(Readout):
    """:attr:`~engine.requests.core.Branch.partial` has [dimensions]: the sum over the tokens so far. A mean needs the hidden
    states of the whole prompt, so the prompt is in the branch and the prefix is empty.
    """

    kind = wire.Embedding

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[_Part] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, tokens = segment.request, len(segment.tokens)
        assert isinstance(request, ScoringRequest)
        assert isinstance(request.readout, wire.Embedding)
        if segment.completes:
            self.branches.append(branch)
        if self.context.decoder.config.pooling == "mean":
            assert not len(request.prefix)
            self._parts.append(_Part(branch, request.readout, segment.start, tokens, segment.completes))
            self.hidden_rows += range(row, row + tokens)
        elif segment.completes:
            self._parts.append(_Part(branch, request.readout, 0, 1, completes=True))
            self.hidden_rows.append(row + tokens - 1)

    def queue(self, step: StepTensors, download: Download) -> None:
        size = step.hidden[self].shape[1]
        hidden = step.hidden[self][:, : max(part.readout.dimensions or size for part in self._parts)]
        parts = torch.split(hidden, [part.tokens for part in self._parts])
        mean = self.context.decoder.config.pooling == "mean"
        sums = torch.stack([part.sum(0, dtype=torch.float32) for part in parts]) if mean else hidden.float()
        self._sums = download.add(sums)

    def read(self, result: StepResult) -> None:
        for part, row in zip(self._parts, self._sums.tensor.numpy(), strict=True):
            earlier, tokens = part.branch.partial_before(part.start), part.start + part.tokens
            own = row[: part.readout.dimensions]
            total = own.copy() if earlier is None else earlier + own
            if part.completes:
                result.rows.append((part.branch, embedding(total / tokens, normalize=part.readout.normalize)))
            else:
                part.branch.partial = PartialRow(tokens, total)


def embedding(vector: npt.NDArray[np.float32], *, normalize: bool) -> list[float]:
    """A row of :class:`engine.wire.Scored`, scaled to length 1 where asked for."""
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), SMALLEST_NORM)
    return vector.tolist()  # type: ignore[no-any-return]
