"""Raw length values at the last token of each branch."""

from __future__ import annotations

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Download
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from engine.requests.core import Branch


class LengthValueReadout(Readout):
    """The length model computes the values from :attr:`segment_indices`, in the same pass as guided draws."""

    kind = wire.LengthValue

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self.segment_indices: list[int] = []
        """Segments of the batch on the length model whose last token is valued."""

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        if segment.completes:
            self.branches.append(branch)
            self.segment_indices.append(index)

    def queue(self, step: StepTensors, download: Download) -> None:
        assert step.guided is not None
        assert step.guided.values is not None
        self._values = download.add(step.guided.values)

    def read(self, result: StepResult) -> None:
        result.rows += [(branch, [z]) for branch, z in zip(self.branches, self._values.tensor.tolist(), strict=True)]
