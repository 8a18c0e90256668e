"""Label log-probabilities at the last token of each scored branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Copy, Download, Upload
from engine.models.modules import TokenHead
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from engine.requests.core import Branch, ScoringRequest
from kernels.label_logprobs import label_logprobs


class LabelReadout(Readout):
    """Log-probabilities over the full vocabulary. Logits of other tokens are never stored."""

    kind: ClassVar[type[wire.Labels]] = wire.Labels
    numbers: Copy
    """[rows, largest number of labels]"""

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._labels: list[list[int]] = []

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, ScoringRequest)
        assert isinstance(request.readout, wire.Labels)
        if segment.completes:
            self.branches.append(branch)
            self.hidden_rows.append(row + segment.tokens.size - 1)
            self._labels.append(request.readout.tokens)

    def upload(self, upload: Upload) -> None:
        self._label_copy = upload.add(label_table(self._labels))

    def queue(self, step: StepTensors, download: Download) -> None:
        labels = self._label_copy.tensor.view(len(self._labels), -1)
        hidden = step.hidden[self]

        def logprobs(head: TokenHead, rows: slice) -> Tensor:
            return label_logprobs(head.input(hidden[rows]), head.operand, labels[rows], head.cap)

        self.numbers = download.add(self.context.by_head(self.branches, logprobs))

    def read(self, result: StepResult) -> None:
        rows = zip(self.branches, self.numbers.tensor.tolist(), self._labels, strict=True)
        result.rows += [(branch, row[: len(labels)]) for branch, row, labels in rows]


def label_table(labels: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """[rows, largest number of labels]; short rows are padded with token 0."""
    if len(set(map(len, labels))) == 1:
        return np.array(labels, np.int64)
    table = np.zeros((len(labels), max(map(len, labels), default=0)), np.int64)
    for row, ids in enumerate(labels):
        table[row, : len(ids)] = ids
    return table
