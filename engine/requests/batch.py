"""The batch of one step: segments of prefixes and branches, and the evaluations of candidates by the length model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from yardstick_llm.engine.ints import EMPTY, Ints
from yardstick_llm.engine.requests.core import Branch, Request
from yardstick_llm.engine.requests.images import ImageWork


class ExtendSegment(msgspec.Struct, frozen=True, eq=False):
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
    def completes(self) -> bool:
        """Whether this segment computes the last token of its branch, whose hidden row the request needs, and its draft. A step may
        compute a branch in several segments; only the last of them completes it.
        """
        branch = self.branch
        return branch is not None and self.context.size == self.request.prefix.size + branch.tokens.size + branch.draft.size


class CandidatePass(msgspec.Struct, frozen=True, eq=False):
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
    images: list[ImageWork] = field(default_factory=list)
    """Images that vision towers embed before the decoders compute their tokens."""
    load: int = 0
    """Upper bound of the tokens of the step on both models, candidates and tokens of :attr:`images` included."""

    def add(self, segment: ExtendSegment) -> None:
        """Add a segment. Segments of a model are computed in the order in which they are added."""
        count = segment.tokens.size
        self.load += count
        if segment.request.on_lenvm:
            self.lenvm_segments.append(segment)
        else:
            self.segments.append(segment)
            self.tokens += count

    def extend(self, segments: Iterable[ExtendSegment], tokens: int, *, on_lenvm: bool) -> None:
        """Add segments of one model. ``tokens``: the sum of their tokens."""
        self.load += tokens
        if on_lenvm:
            self.lenvm_segments.extend(segments)
        else:
            self.segments.extend(segments)
            self.tokens += tokens

    def add_candidate_pass(self, branch: Branch, candidate_pass: CandidatePass, candidates: int) -> None:
        """Let ``branch`` draw among ``candidates`` tokens at most."""
        self.candidate_passes[branch] = candidate_pass
        self.load += candidates + (len(candidate_pass.pending.tokens) if candidate_pass.pending else 0)

    def add_image(self, work: ImageWork, tokens: int) -> None:
        """Let the step embed an image of ``tokens``."""
        self.images.append(work)
        self.load += tokens

    @property
    def requests(self) -> list[Request]:
        """The request of each segment and image."""
        segments = (segment.request for segment in (*self.segments, *self.lenvm_segments))
        return [*segments, *(work.request for work in self.images)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.segments or self.lenvm_segments or self.images)


class Tokens(NamedTuple):
    """The tokens of some segments, one after the other, [tokens] int64 each."""

    ids: npt.NDArray[np.int64]
    """:data:`~engine.requests.core.PENDING` where the step before draws the token."""
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[ExtendSegment]) -> Tokens:
        """``segments``: of one model."""
        ids = np.concatenate([EMPTY, *(segment.tokens for segment in segments)]).astype(np.int64)
        lengths = np.array([segment.tokens.size for segment in segments], np.int64)
        ends = np.array([segment.context.size for segment in segments], np.int64)
        # Token i of the batch is at position i, shifted by how far its segment begins behind its place in the batch.
        shifts = ends - np.cumsum(lengths)
        return cls(ids, np.arange(len(ids)) + np.repeat(shifts, lengths))
