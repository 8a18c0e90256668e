"""Log-probabilities of a branch's own tokens, for as many of them as a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Download, Upload
from engine.ints import Ints
from engine.models.modules import TokenHead
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from engine.requests.core import Branch, PartialRow, ScoringRequest
from kernels.row_chunks import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class _Part:
    """One segment of a branch."""

    branch: Branch
    start: int
    """Place of the segment's first token in its branch."""
    targets: Ints
    """Tokens that the segment's rows predict."""
    completes: bool


class LikelihoodReadout(Readout):
    """:class:`engine.requests.core.ScoringRequest` says how branches and targets are made from the message.

    :attr:`~engine.requests.core.Branch.partial` has [tokens, 2]: log-probability, and 1 where the token is the most probable one.
    """

    kind = wire.Likelihood

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[_Part] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, count = segment.request, len(segment.tokens)
        assert isinstance(request, ScoringRequest)
        targets = request.targets[branch.index][segment.start : segment.start + count]
        self._parts.append(_Part(branch, segment.start, targets, segment.completes))
        self.hidden_rows += range(row, row + count)
        if segment.completes:
            self.branches.append(branch)

    def upload(self, upload: Upload) -> None:
        self._target_copy = upload.add(np.concatenate([part.targets for part in self._parts]))

    def queue(self, step: StepTensors, download: Download) -> None:
        hidden, targets = step.hidden[self], self._target_copy.tensor
        branches = [part.branch for part in self._parts for _ in part.targets]

        def likelihoods(head: TokenHead, rows: slice) -> Tensor:
            return token_likelihoods(head, hidden[rows], targets[rows])

        self._values = download.add(self.context.by_head(branches, likelihoods))

    def read(self, result: StepResult) -> None:
        lengths = [len(part.targets) for part in self._parts]
        for part, tensor in zip(self._parts, torch.split(self._values.tensor, lengths), strict=True):
            earlier, values = part.branch.partial_before(part.start), tensor.numpy()
            values = np.concatenate([*([] if earlier is None else [earlier]), values])
            part.branch.partial = PartialRow(len(values), values)
            if part.completes:
                result.rows.append((part.branch, [*values[:, 0].tolist(), float(values[:, 1].all())]))


def token_likelihoods(head: TokenHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target after its row of ``hidden``, and 1 where no token is more probable, otherwise 0.

    hidden: [rows, hidden]; targets: [rows] int64. -> [rows, 2] float32. Logits exist for a bounded number of rows at a
    time.
    """
    return torch.cat(list(_likelihood_chunks(head, hidden, targets)))


def _likelihood_chunks(head: TokenHead, hidden: Tensor, targets: Tensor) -> Iterator[Tensor]:
    count = max(1, CHUNK_ELEMENTS // len(head.weight))
    for rows, ids in zip(torch.split(hidden, count), torch.split(targets, count), strict=True):
        logits = head.logits(rows).float()
        chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        yield torch.stack((chosen - logits.logsumexp(1), (chosen >= logits.amax(1)).float()), 1)
