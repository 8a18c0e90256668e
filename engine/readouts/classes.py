"""Logits of a classification or reward head at the last token of each branch."""

from __future__ import annotations

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.core import Branch
from engine.device.transfer import Download, Upload
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors


class ClassReadout(Readout):
    """The head reads the hidden state of the last token."""

    kind = wire.Classes

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._rows: list[int] = []

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        if segment.completes:
            self.branches.append(branch)
            self._rows.append(row + len(segment.tokens) - 1)

    def upload(self, upload: Upload) -> None:
        self._row_copy = upload.add(self._rows)

    def queue(self, step: StepTensors, download: Download) -> None:
        assert step.hidden is not None
        hidden = step.hidden.index_select(0, self._row_copy.tensor)
        self._logits = download.add(self.context.decoder.class_logits(hidden))

    def read(self, result: StepResult) -> None:
        result.rows += zip(self.branches, self._logits.tensor.tolist(), strict=True)
