"""Logits of a classification or reward head at the last token of each branch."""

from __future__ import annotations

from engine import wire
from engine.batch import ExtendSegment
from engine.device.transfer import Download
from engine.readouts.base import Readout, StepResult, StepTensors
from engine.requests.core import Branch


class ClassReadout(Readout):
    """The head reads the hidden state of the last token."""

    kind = wire.Classes

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        if segment.completes:
            self.branches.append(branch)
            self.hidden_rows.append(row + len(segment.tokens) - 1)

    def queue(self, step: StepTensors, download: Download) -> None:
        parts = self.context.class_logits(step.hidden[self], self.branches)
        self._logits = [download.add(part) for part in parts]

    def read(self, result: StepResult) -> None:
        rows = [row for part in self._logits for row in part.tensor.tolist()]
        result.rows += zip(self.branches, rows, strict=True)
