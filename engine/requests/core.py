"""Requests and their branches. :mod:`engine.batch` has the batch of one step.

A request is one prefix and its branches. Tokens of the prefix live in the prefix cache, where all requests may share them; tokens
of a branch live in slots of its own. Scoring gives each item a branch, and a generation each of its sequences
(:mod:`engine.requests.generation`). The remaining work of a request is the tokens without a slot; a preempted branch has no slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine import wire
from engine.ints import EMPTY, IntBuffer, Ints, ints
from engine.requests.images import RequestImages
from engine.requests.length_guidance import GuidedSection
from engine.requests.readout_prompts import prompt_parts_of

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node
    from engine.lora.adapter import LoadedAdapter
    from engine.requests.item_group import ItemBlock, ItemGroup
    from engine.requests.prompt_lookup import Lookup
    from engine.structured.constraint import Constraint

NOBODY = wire.Caller()
PENDING = -1
"""Stands for a token that a step in flight is drawing: the next step takes it from device memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialRow:
    """Values that a readout has read for the first tokens of a branch, which several steps compute."""

    tokens: int
    values: npt.NDArray[np.float32]
    """Their meaning and shape are those of the readout."""


@dataclass(eq=False, slots=True)
class Branch:
    """New tokens on top of a request's prefix."""

    request: Request
    index: int
    tokens: IntBuffer
    context: IntBuffer = field(default_factory=IntBuffer)
    """Slots of the prefix, then of the branch's own computed tokens; empty before the first one. Views stay valid as it grows."""
    given: int = 0
    """Number of tokens that came with the request; the tokens behind them are output."""
    prompt_logprobs: list[wire.Logprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens so far, while the prompt is computed in chunks."""
    partial: PartialRow | None = None
    """Set by readouts that read more tokens than the last."""
    unsent: list[wire.Delta] = field(default_factory=list)
    """Deltas that wait until they have as many tokens as the caller wants in one message."""
    pending_steps: int = 0
    """Pending steps that compute the branch's last token."""
    pending: bool = False
    """Whether a pending step draws the newest token, which is :data:`PENDING` until then."""
    done: bool = False
    """Whether it has ended. With overlap a step may compute more of it, whose results are dropped."""
    constraint: Constraint | None = None
    """The state of the grammar that the output follows; None without a grammar."""
    section: GuidedSection | None = None
    """Section of the output whose draws are guided; None for all of it."""
    thinking: GuidedSection | None = None
    """The thinking section, if its length has a limit."""
    lookup: Lookup | None = None
    """Where its drafts come from; None without prompt lookup."""
    draft: Ints = field(default_factory=lambda: EMPTY)
    """Draft of the tokens behind the newest, which a pending step computes. Its slots are the last ones of ``context``."""
    packed_sampling: bytes = b""
    """:func:`engine.device.sampling_rows.pack` of its parameters; empty before its first draw."""
    plain_sampling: bool = False
    """Whether ``packed_sampling`` and a position are all that decides a draw (:mod:`engine.device.sampling_rows`)."""
    aux_branch: Branch | None = None
    """Branch of this sequence on the length model; None if the sequence is not guided. Both branches share one token buffer."""
    main_branch: Branch | None = None
    """On a branch of an :class:`AuxRequest`: the branch on the main model."""

    def __post_init__(self) -> None:
        self.given = self.tokens.size

    def await_draw(self) -> None:
        """Add the token that a pending step draws."""
        self.tokens.append(PENDING)
        self.pending = True

    def draw(self, token: int) -> None:
        """Take the token that a settled step has drawn."""
        if self.pending:
            self.tokens.replace_last(token)
            self.pending = False
        else:
            self.tokens.append(token)

    @property
    def computed(self) -> int:
        """Tokens with a slot, without the draft."""
        return self.context.size - self.request.prefix.size - self.draft.size if self.context.size else 0

    @property
    def slots(self) -> Ints:
        """Slots of the tokens computed so far, and of the draft."""
        return self.context.from_(self.request.prefix.size)

    @property
    def remaining(self) -> int:
        """Tokens without a slot."""
        return self.tokens.size - self.computed

    def add_slots(self, slots: Ints) -> None:
        """Append the slots of the next tokens."""
        if self.context.size:
            self.context.extend(slots)
        else:
            self.context.fill(self.request.prefix_slots.view, slots)

    @property
    def drawn(self) -> int:
        """Number of :attr:`outputs`."""
        return self.tokens.size - self.given

    @property
    def outputs(self) -> Ints:
        """Tokens drawn so far, in this attempt."""
        return self.tokens.from_(self.given)

    def partial_before(self, start: int) -> npt.NDArray[np.float32] | None:
        """Return the values for the tokens before ``start``; None if ``start`` is 0, where a preempted branch begins again."""
        if start == 0:
            return None
        assert self.partial is not None and self.partial.tokens == start  # noqa: PT018
        return self.partial.values


next_arrival = itertools.count().__next__
"""Return the number of a new request, in the order of arrival."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prefix and its branches, and their progress."""

    id: str
    prefix: Ints
    branches: list[Branch] = field(default_factory=list)
    """Not finished yet, in order."""
    caller: wire.Caller = NOBODY
    adapter: LoadedAdapter | None = None
    """The adapter of the main model that it is computed with; None: the base model."""
    images: RequestImages | None = None
    """Images in its prompt."""
    size: int = 0
    """Tokens that came with it, each shared one once."""
    priority: int = 0
    received: float = 0.0
    """Time of receipt on the monotonic clock, seconds."""
    first_computed: float | None = None
    """Time of the first step that computes a part of it, on the same clock."""
    expires: float | None = None
    """Deadline on the monotonic clock."""
    arrival: int = field(default_factory=next_arrival)
    node: Node | None = None
    """Node of the prefix cache up to which this request holds its prefix; None while the request waits."""
    group: ItemGroup | None = None
    """The items of which this request computes one or some. Such a request ends after few steps and takes no running place."""
    on_lenvm: bool = False
    """Whether the length model computes it, in the length model's slots."""
    prefix_slots: IntBuffer = field(default_factory=IntBuffer)
    cached_tokens: int = 0
    computed_tokens: int = 0
    begun: bool = False
    step: int = 0
    """Number of the last step that computes a part of it; 0 before the first."""
    taken: int = 0
    """Slots that it took from the pool and holds: those of its branches, and of prefix tokens that it computed itself."""

    @property
    def kind(self) -> type[msgspec.Struct] | None:
        """Type of the message that asks for the request's output: a :data:`engine.wire.ScoreReadout`, or
        :class:`engine.wire.Generate`. None for a request without outputs of its own."""
        return None

    @property
    def first(self) -> Request:
        """The request that starts when the turn of this one comes."""
        return self

    @property
    def awaits_result(self) -> bool:
        """Whether pending steps compute all that is left of it. Then it is not preempted."""
        return False

    @property
    def with_aux(self) -> tuple[Request, ...]:
        """This request and, where it is guided, its :class:`AuxRequest`."""
        return (self,)

    @property
    def main_request(self) -> Request:
        """The request that runs: this one, the owner of an :class:`AuxRequest`, or the block of an item."""
        return self

    @property
    def prefix_remaining(self) -> int:
        """Prefix tokens without a slot."""
        return self.prefix.size - self.prefix_slots.size

    @property
    def salt(self) -> Hashable | None:
        """Tree of the prefix cache that the request uses; None: a private tree of which nothing is kept."""
        salt = self.caller.cache_salt if self.adapter is None else (self.caller.cache_salt, self.adapter.digest)
        return salt if self.caller.keep_prefix else None

    @property
    def queue_seconds(self) -> float:
        """Time from receipt to the first step that computes a part of it; 0 before that step."""
        return 0.0 if self.first_computed is None else self.first_computed - self.received

    def may_run_ahead(self, branch: Branch) -> bool:  # noqa: ARG002
        """Whether the step after the one that draws the next token of ``branch`` may begin before that token is known."""
        return False

    @property
    def reserve(self) -> int:
        """Tokens of the next step that must be kept free for this request's decoding branches."""
        return 0

    @property
    def droppable(self) -> bool:
        """Whether ending it once its deadline has passed saves work and takes nothing from its caller."""
        return not self.begun


class RawLabels(wire.Labels, frozen=True):
    """Kind of a request for :class:`engine.wire.Labels` with ``raw``."""


@dataclass(eq=False, slots=True, kw_only=True)
class ScoringRequest(Request):
    """A request with one result at the end of each branch and no draws."""

    readout: wire.ScoreReadout
    rows: list[list[float]]
    """[branch]; empty until that branch is done."""
    targets: list[Ints] = field(default_factory=list)
    """[branch] tokens of the message's branch, where the readout is :class:`engine.wire.Likelihood`: row i of the request's branch
    predicts target i. Empty for other readouts."""
    index: int = 0
    """Place of this item in its group."""
    block: ItemBlock | None = None
    """Set on an item that is computed with others."""

    @classmethod
    def of(
        cls,
        message: wire.Score,
        received: float,
        adapter: LoadedAdapter | None = None,
        *,
        mean_pooling: bool = False,
        pad: int | None = None,
    ) -> ScoringRequest:
        """``received``: seconds, monotonic; ``mean_pooling``, ``pad``: see :func:`prompt_parts_of`."""
        prefix, given, targets = prompt_parts_of(message, mean_pooling=mean_pooling, pad=pad)
        request = cls(
            id=message.id,
            prefix=ints(prefix),
            caller=message.caller,
            adapter=adapter,
            size=len(prefix) + sum(map(len, given)),
            received=received,
            priority=message.priority,
            expires=None if message.deadline is None else received + message.deadline,
            on_lenvm=isinstance(message.readout, wire.LengthValue),
            readout=message.readout,
            rows=[[] for _ in given],
            targets=targets,
        )
        request.branches = [Branch(request, i, IntBuffer(ints(tokens))) for i, tokens in enumerate(given)]
        return request

    @property
    def kind(self) -> type[msgspec.Struct]:
        readout = self.readout
        return RawLabels if type(readout) is wire.Labels and readout.raw else type(readout)

    @property
    def main_request(self) -> Request:
        return self if self.block is None else self.block

    @property
    def awaits_result(self) -> bool:
        return self.group is not None and self.branches[0].pending_steps > 0

    @property
    def droppable(self) -> bool:
        return any(branch.remaining for branch in self.branches)
