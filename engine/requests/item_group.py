"""Scores of many items with one query: :class:`engine.wire.ScoreItems`.

A message is one request in the queue, its :class:`ItemGroup`. When its turn comes, cached items start together as an
:class:`ItemBlock` (:mod:`engine.scheduling.item_blocks`). Each other item starts as a request of its own, whose prefix is the item
and whose branch is the query. The group collects the rows of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine import wire
from engine.ints import EMPTY, IntBuffer, Ints, ints
from engine.requests.core import Branch, Request, ScoringRequest, next_arrival
from engine.requests.images import ItemImages

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node
    from engine.lora.adapter import LoadedAdapter


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
    pinned_items: int = 0
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
        tokens, items = (self.cached_tokens, self.computed_tokens), (self.cached_items, self.pinned_items)
        return wire.Scored(self.id, self.rows, *tokens, self.queue_seconds, *items)

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
