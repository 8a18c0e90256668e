"""Requests and their branches. :mod:`engine.requests.batch` has the batch of one step.

A request is one prefix and its branches. Tokens of the prefix live in the prefix cache, where all requests may share them; tokens
of a branch live in slots of its own. Scoring gives each item a branch, and a generation each of its sequences
(:mod:`engine.requests.generation`). The remaining work of a request is the tokens without a slot; a preempted branch has no slots.

A message of many items (:class:`engine.wire.ScoreItems`) is one request in the queue, its :class:`ItemGroup`. When its turn comes,
cached items start together as an
:class:`ItemBlock` (:mod:`engine.scheduling.admission`). Each other item starts as a request of its own, whose prefix is the item
and whose branch is the query. The group collects the rows of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, IntBuffer, Ints, ints
from yardstick_llm.engine.requests.units import Written

if TYPE_CHECKING:
    from yardstick_llm.engine.kvcache.eviction import Node
    from yardstick_llm.engine.models.lora.slots import LoadedAdapter
    from yardstick_llm.engine.requests.images import ItemImages, RequestImages
    from yardstick_llm.engine.requests.prompt_lookup import Lookup
    from yardstick_llm.engine.structured.constraint import Constraint


class PromptParts(NamedTuple):
    """A score's prompts as the engine computes them."""

    prefix: list[int]
    branches: list[list[int]]
    targets: list[Ints]
    """[branch] for likelihoods: row i of a branch predicts target i. Empty for other readouts."""


def prompt_parts_of(message: wire.Score, *, mean_pooling: bool, pad: int | None = None) -> PromptParts:
    """Return the parts of a message's prompts. ``mean_pooling``: whether an embedding is the mean over the whole prompt. ``pad``:
    token that a classification head leaves out at the end.

    For likelihoods, each branch starts with the last token of the message's prefix, whose row predicts the first target. It lacks
    the last token of the message's branch, whose row predicts no target. For means over the prompt, each branch has the whole
    prompt, because the prefix cache keeps no hidden states; and so do branches of a head if one of them is padding alone.
    """
    prefix, branches = message.prefix, message.branches
    if isinstance(message.readout, wire.Likelihood):
        computed = [[prefix[-1], *tokens[:-1]] for tokens in branches]
        return PromptParts(prefix[:-1], computed, [ints(tokens) for tokens in branches])
    if isinstance(message.readout, wire.Embedding) and mean_pooling and prefix:
        return PromptParts([], [prefix + tokens for tokens in branches], [])
    if isinstance(message.readout, wire.Classes) and pad is not None and any(tokens[-1] == pad for tokens in branches):
        unpadded = [without_padding(tokens, pad) for tokens in branches]
        if all(unpadded):
            return PromptParts(prefix, unpadded, [])
        return PromptParts([], [without_padding(prefix + tokens, pad) or (prefix + tokens)[:1] for tokens in branches], [])
    return PromptParts(prefix, branches, [])


def without_padding(tokens: list[int], pad: int) -> list[int]:
    """Return ``tokens`` up to the last one that is not ``pad``."""
    end = len(tokens)
    while end and tokens[end - 1] == pad:
        end -= 1
    return tokens[:end]


NOBODY = wire.Caller()
PENDING = -1
"""Stands for a token that a step in flight is drawing: the next step takes it from device memory."""


@dataclass(slots=True)
class GuidedSection:
    """A section of one output, as far as the output is known."""

    thinking: wire.Thinking
    wanted: Literal["thinking", "answer"]
    begin: int | None = None
    """Output tokens before the section, if the next draw is in it; otherwise None."""
    settled: bool = False
    """Whether no further token changes this."""
    _searched: int = 0

    def read(self, output: Ints) -> None:
        """Follow the output. ``output``: all of its tokens so far; the ones that were read before are not read again."""
        if self.settled or not len(output):
            self._begin_opened()
            return
        opened = self.thinking.open
        if opened is not None and int(output[0]) != opened:  # no thinking section
            self.begin, self.settled = (0 if self.wanted == "answer" else None), True
            return
        found = np.flatnonzero(output[self._searched :] == self.thinking.close)
        if len(found):
            end = self._searched + int(found[0]) + 1
            self.begin, self.settled = (end if self.wanted == "answer" else None), True
        elif self.wanted == "thinking":
            self.begin = 0 if opened is None else 1
        self._searched = len(output)

    def _begin_opened(self) -> None:
        """The first draw is in the thinking section, if the prompt has begun it."""
        if not self.settled and self.wanted == "thinking" and self.thinking.open is None:
            self.begin = 0


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
    written: Written | None = None
    """Units of its output, if the target of its length counts other ones than tokens; None before the first draw."""
    lookup: Lookup | None = None
    """Where its drafts come from; None without prompt lookup."""
    draft: Ints = field(default_factory=lambda: EMPTY)
    """Draft of the tokens behind the newest, which a pending step computes. Its slots are the last ones of ``context``."""
    packed_sampling: bytes = b""
    """:func:`engine.runner.sampling.pack` of its parameters; empty before its first draw."""
    plain_sampling: bool = False
    """Whether ``packed_sampling`` and a position are all that decides a draw (:mod:`engine.runner.sampling`)."""
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
    delay: float = 0.0
    """Seconds by which it is served as if it had come later, among the requests of its tenant."""
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
    def accepted(self) -> Request:
        """The request of a caller to which this one belongs."""
        return self.group or self.main_request

    @property
    def takes_place(self) -> bool:
        """Whether it takes a running place."""
        return self.group is None

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
    first_tokens: int = 0
    """Tokens of the first text of a pair, with which each branch begins. 0 where branches are no pairs."""
    index: int = 0
    """Place of this item in its group."""
    block: ItemBlock | None = None
    """Set on an item that is computed with others."""
    forecasts: Request | None = None
    """The generation whose length it forecasts; that one waits for it. None: it answers a message."""

    @classmethod
    def of(
        cls,
        message: wire.Score,
        received: float,
        adapter: LoadedAdapter | None = None,
        *,
        mean_pooling: bool = False,
        pad: int | None = None,
        whole: bool = False,
    ) -> ScoringRequest:
        """``received``: seconds, monotonic; ``mean_pooling``, ``pad``: see :func:`prompt_parts_of`. ``whole``: each branch has the
        whole prompt, because the model computes it at once."""
        if whole:
            prefix, given, targets = PromptParts([], [message.prefix + tokens for tokens in message.branches], [])
        else:
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
            first_tokens=len(message.prefix) if whole else 0,
        )
        request.branches = [Branch(request, i, IntBuffer(ints(tokens))) for i, tokens in enumerate(given)]
        return request

    @property
    def kind(self) -> type[msgspec.Struct]:
        readout = self.readout
        return RawLabels if type(readout) is wire.Labels and readout.raw else type(readout)

    @property
    def unseen_tokens(self) -> int:
        """Tokens at the end of each branch to which no token attends."""
        return self.readout.expansion_tokens if isinstance(self.readout, wire.TokenVectors) else 0

    @property
    def main_request(self) -> Request:
        return self if self.block is None else self.block

    @property
    def accepted(self) -> Request:
        return self.forecasts or self.group or self.main_request

    @property
    def takes_place(self) -> bool:
        return self.group is None and self.forecasts is None

    @property
    def awaits_result(self) -> bool:
        return self.group is not None and self.branches[0].pending_steps > 0

    @property
    def droppable(self) -> bool:
        return any(branch.remaining for branch in self.branches)


@dataclass(eq=False, slots=True, kw_only=True)
class ItemGroup(Request):
    """The items of one message. It waits while items have not started. It holds no slots itself."""

    message: wire.ScoreItems
    prefixes: list[Ints]
    """[item]"""
    query: IntBuffer
    """The message's query. It is the branch of each item, except for likelihoods and means: see :meth:`ScoringRequest.of`."""
    items: list[Ints]
    """[item] all its tokens."""
    waiting: list[int] = field(default_factory=list)
    """Items that have not started, in order."""
    may_be_cached: bool = True
    """Whether some of them may be cached that no step has looked up, or that had no room."""
    parts: dict[int, Request] = field(default_factory=dict)
    """Blocks and requests of items that run, by arrival."""
    rows: list[list[float]]
    """[item]; empty until the item is done."""
    left: int
    """Items that are not done."""
    cached_items: int = 0
    item_images: ItemImages | None = None
    """Images of items and query; None without any."""
    _requests: dict[int, ScoringRequest] = field(default_factory=dict)
    """Requests of waiting items: of the first one, and of items that were preempted."""

    @classmethod
    def of(
        cls, message: wire.ScoreItems, received: float, adapter: LoadedAdapter | None = None, *, mean_pooling: bool = False
    ) -> ItemGroup:
        """``received`` and ``mean_pooling``: see :meth:`ScoringRequest.of`. The message has been checked."""
        items, query, readout = items_of(message), ints(message.query), message.readout
        prefixes = items
        if isinstance(readout, wire.Likelihood):
            prefixes = [item[:-1] for item in items]
        elif isinstance(readout, wire.Embedding) and mean_pooling:
            prefixes = [EMPTY] * len(items)
        return cls(
            id=message.id,
            prefix=EMPTY,
            caller=message.caller,
            adapter=adapter,
            size=sum(map(len, items)) + len(items) * len(query),
            received=received,
            priority=message.priority,
            expires=None if message.deadline is None else received + message.deadline,
            on_lenvm=isinstance(readout, wire.LengthValue),
            message=message,
            prefixes=prefixes,
            query=IntBuffer.over(query, len(query)),
            items=items,
            waiting=list(range(len(items))),
            rows=[[] for _ in items],
            left=len(items),
        )

    @property
    def first(self) -> ScoringRequest:
        """The request of the first waiting item."""
        index = self.waiting[0]
        request = self._requests.get(index)
        if request is None:
            request = self._requests[index] = self._request(index, next_arrival(), None, IntBuffer(), IntBuffer())
        return request

    @property
    def droppable(self) -> bool:
        return bool(self.waiting) or any(part.droppable for part in self.parts.values())

    def start(self, part: Request) -> bool:
        """Note that ``part`` runs: the first waiting item, or a block. Return whether other items wait."""
        self.begun = True
        self.size -= part.size
        self.parts[part.arrival] = part
        if isinstance(part, ItemBlock):
            started = {item.index for item in part.items}
            self.waiting = [index for index in self.waiting if index not in started]
        else:
            del self._requests[self.waiting.pop(0)]
        return len(self.waiting) > 0

    def take_back(self, request: ScoringRequest) -> None:
        """Let an item that was preempted wait in front of the others."""
        del self.parts[request.arrival]
        self.size += request.size
        self.waiting.insert(0, request.index)
        self._requests[request.index] = request

    def cached(self, index: int, node: Node, context: Ints) -> ScoringRequest:
        """Return the request of a waiting item for a block. ``node``: up to which it holds its prefix; ``context``: slots of prefix
        and branch."""
        count, size = self.query.size, context.size
        request = self._request(index, self.arrival, node, IntBuffer.over(context, size - count), IntBuffer.over(context, size))
        request.cached_tokens, request.computed_tokens = size - count, count
        earlier = self._requests.pop(index, None) if self._requests else None
        if earlier is not None and earlier.begun:  # it was preempted
            request.cached_tokens = earlier.cached_tokens
            request.computed_tokens += earlier.computed_tokens
        return request

    def take(self, done: Sequence[tuple[ScoringRequest, list[float]]]) -> None:
        """Take the rows of items."""
        self.left -= len(done)
        for request, row in done:
            self.rows[request.index] = row
            self.cached_tokens += request.cached_tokens
            self.cached_items += 0 < request.prefix.size <= request.cached_tokens
            self.computed_tokens += request.computed_tokens

    def end(self, part: Request) -> None:
        """Forget a part whose rows are there. References to and from its branches go, so that it leaves no garbage to collect."""
        del self.parts[part.arrival]
        if isinstance(part, ItemBlock):
            for item in part.items:
                item.branches.clear()
            part.items = []
        part.branches.clear()

    @property
    def answer(self) -> wire.Scored:
        """The answer, when no item is left."""
        return wire.Scored(self.id, self.rows, self.cached_tokens, self.computed_tokens, self.queue_seconds, self.cached_items)

    def _request(self, index: int, arrival: int, node: Node | None, prefix_slots: IntBuffer, context: IntBuffer) -> ScoringRequest:
        item, query, readout, targets = self.items[index], self.query, self.message.readout, []
        if isinstance(readout, wire.Likelihood):
            targets = [query.view]
            query = IntBuffer(np.concatenate([item[-1:], query.view[:-1]]))
        elif item.size > self.prefixes[index].size:
            query = IntBuffer(np.concatenate([item, query.view]))
        request = ScoringRequest(
            id=self.id,
            prefix=self.prefixes[index],
            caller=self.caller,
            adapter=self.adapter,
            size=item.size + self.query.size,
            received=self.received,
            priority=self.priority,
            readout=readout,
            rows=[],
            targets=targets,
            group=self,
            index=index,
            on_lenvm=self.on_lenvm,
            arrival=arrival,
            node=node,
            prefix_slots=prefix_slots,
        )
        request.branches.append(Branch(request, 0, query, context))
        if self.item_images is not None:
            self.item_images.attach(request)
        return request


@dataclass(eq=False, slots=True, kw_only=True)
class ItemBlock(Request):
    """Cached items of one group, of which one step computes all that is left."""

    items: list[ScoringRequest]
    slots: Ints
    """Slots of all branches, which the block owns."""

    @property
    def awaits_result(self) -> bool:
        return True

    @property
    def droppable(self) -> bool:
        return False


def items_of(message: wire.ScoreItems) -> list[Ints]:
    """Return the token ids of each item, not copied."""
    ids = np.frombuffer(message.items, "<i4")
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4")).tolist()
    return [ids[begin:end] for begin, end in pairwise([0, *ends])]
