"""Which readouts a step has. A new kind of output is a file beside this one and an entry in :data:`KINDS`."""

from __future__ import annotations

import msgspec

from engine.requests.batch import Batch, CandidatePass
from engine.runner.readouts.base import Readout, ReadoutContext
from engine.runner.readouts.draws import DrawReadout, PromptLogprobsReadout
from engine.runner.readouts.guided import GuidedDrawReadout
from engine.runner.readouts.scores import (
    ClassReadout,
    EmbeddingReadout,
    LabelLogitsReadout,
    LabelReadout,
    LengthValueReadout,
    LikelihoodReadout,
)

KINDS: tuple[type[Readout], ...] = (
    LabelReadout,
    LabelLogitsReadout,
    LikelihoodReadout,
    ClassReadout,
    EmbeddingReadout,
    DrawReadout,
    PromptLogprobsReadout,
)
"""Outputs of the main model, in the order in which their work is queued."""


class OutputPlan:
    """The outputs of one batch."""

    def __init__(self, batch: Batch, context: ReadoutContext) -> None:
        """Reads ``batch`` as it is now; branches change when the next step is scheduled."""
        main = [kind(context, batch) for kind in KINDS]
        self.guided = GuidedDrawReadout(context, batch)
        self.length_values = LengthValueReadout(context, batch)
        by_kind: dict[type[msgspec.Struct] | None, list[Readout]] = {}
        guided = (self.guided,) if batch.candidate_passes else ()
        for readout in (*main, *guided, self.length_values):
            by_kind.setdefault(readout.kind, []).append(readout)
        for segments in (batch.segments, batch.lenvm_segments):
            row = 0
            for index, segment in enumerate(segments):
                branch = segment.branch
                if branch is not None:
                    for readout in by_kind.get(segment.request.kind, ()):
                        readout.add(segment, branch, row, index)
                row += segment.tokens.size
        self.main: list[Readout] = [readout for readout in main if not readout.empty]
        """Readouts of the main model that have an output."""
        self.lenvm: list[Readout] = [readout for readout in (self.guided, self.length_values) if not readout.empty]
        """Readouts of the length model that have an output."""
        self.readouts = [*self.main, *self.lenvm]
        """All that have an output."""
        self.branches = list(dict.fromkeys(branch for readout in self.readouts for branch in (*readout.branches, *readout.ended)))
        """Branches whose result this step brings."""

    @property
    def skipped(self) -> list[CandidatePass]:
        """Candidate passes that the length model did not compute. Known once the step is launched."""
        return self.guided.skipped
