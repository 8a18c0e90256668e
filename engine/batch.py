"""The batch of one step: segments of prefixes and branches, and the evaluations of candidates by the length model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.core import Branch, Request
from engine.ints import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ExtendSegment:
    """Consecutive new tokens of one prefix or branch in one step.

    Each token attends to the ``context`` slots up to and including its own. A segment may stand on slots that another segment of
    the same step fills, because each layer writes all keys and values before attention reads them.
    """

    request: Request
    branch: Branch | None
    """None for a part of the prefix."""
    tokens: Ints
    context: Ints
    """Slots of the whole context in order of position. The last ``len(tokens)`` of them are ``out_cache_loc``, where this
    segment writes.
    """

    @property
    def start(self) -> int:
        """Place of the first token in its branch or, for a part of the prefix, in the prefix."""
        return len(self.context) - len(self.tokens) - (0 if self.branch is None else len(self.request.prefix))

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Positions of the tokens."""
        return np.arange(len(self.context) - len(self.tokens), len(self.context), dtype=np.int64)

    @property
    def completes(self) -> bool:
        """Whether this segment computes the last token of its branch, whose hidden row the request needs. A step may compute a
        branch in several segments; only the last of them completes it.
        """
        return self.branch is not None and len(self.context) == len(self.request.prefix) + len(self.branch.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CandidatePass:
    """A guided draw on the length model. Its candidates are one-token branches behind all known tokens."""

    branch: Branch
    """The aux branch."""
    prefix: Ints
    """Slots of all known tokens, in order of position."""
    pending: ExtendSegment | None
    """The last known tokens, where the length model has not computed them yet."""
    slot: int
    """Slot for the candidate that is drawn."""


@dataclass(slots=True)
class Batch:
    """All work of one step, scoring and decoding together."""

    segments: list[ExtendSegment] = field(default_factory=list)
    tokens: int = 0
    """Number of tokens of ``segments``."""
    lenvm_segments: list[ExtendSegment] = field(default_factory=list)
    """Segments on the length model, without the pending tokens of ``candidate_passes``."""
    candidate_passes: dict[Branch, CandidatePass] = field(default_factory=dict)
    """One pass for each guided branch that draws."""
    load: int = 0
    """Upper bound of the tokens of the step on both models, candidates included."""

    def add(self, segment: ExtendSegment) -> None:
        """Add a segment. Segments of a model are computed in the order in which they are added."""
        self.load += len(segment.tokens)
        if segment.request.on_lenvm:
            self.lenvm_segments.append(segment)
        else:
            self.segments.append(segment)
            self.tokens += len(segment.tokens)

    def add_candidate_pass(self, branch: Branch, candidate_pass: CandidatePass, candidates: int) -> None:
        """Let ``branch`` draw among ``candidates`` tokens at most."""
        self.candidate_passes[branch] = candidate_pass
        self.load += candidates + (len(candidate_pass.pending.tokens) if candidate_pass.pending else 0)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.segments or self.lenvm_segments)
