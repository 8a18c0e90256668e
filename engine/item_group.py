"""Scores of many items with one query. Each item is a request of its own, whose prefix is the item and whose branch is the query.
So items are admitted, computed and evicted one by one. The group collects their rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from engine import wire
from engine.core import Branch, ScoreRequest
from engine.ints import IntBuffer, Ints


@dataclass(eq=False, slots=True)
class ItemGroup:
    """The requests of one :class:`engine.wire.ScoreItems`."""

    id: str
    requests: list[ScoreRequest] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    """[item]; empty until the item is done."""
    left: int = 0
    """Items that are not done."""
    cached_tokens: int = 0
    cached_items: int = 0
    computed_tokens: int = 0
    queue_seconds: float = 0.0
    pin_seconds: float | None = None
    """:attr:`engine.wire.ScoreItems.pin_seconds`."""
    pinned_items: int = 0

    @classmethod
    def of(cls, message: wire.ScoreItems, now: float, *, mean_pooling: bool = False) -> ItemGroup:
        """``now`` and ``mean_pooling``: see :meth:`ScoreRequest.of`. The message has been checked."""
        group = cls(message.id, pin_seconds=message.pin_seconds)
        query = IntBuffer(np.array(message.query, np.int32))
        for index, item in enumerate(items_of(message)):
            group.requests.append(group._request(message, index, item, query, now, mean_pooling=mean_pooling))
        group.rows = [[] for _ in group.requests]
        group.left = len(group.requests)
        return group

    def take(self, request: ScoreRequest, row: list[float]) -> wire.Scored | None:
        """Take the row of one item, whose request has ended; return the answer with the last one."""
        self.rows[request.index] = row
        self.left -= 1
        self.cached_tokens += request.cached_tokens
        self.cached_items += len(request.prefix) > 0 and request.cached_tokens >= len(request.prefix)
        self.computed_tokens += request.computed_tokens
        self.queue_seconds = max(self.queue_seconds, request.queue_seconds)
        if self.left:
            return None
        tokens, items = (self.cached_tokens, self.computed_tokens), (self.cached_items, self.pinned_items)
        return wire.Scored(self.id, self.rows, *tokens, self.queue_seconds, *items)

    def _request(
        self, message: wire.ScoreItems, index: int, item: Ints, query: IntBuffer, now: float, *, mean_pooling: bool
    ) -> ScoreRequest:
        """Return the request of one item. See :meth:`ScoreRequest.of` for likelihoods and means. Items share ``query``, to which
        nothing is added."""
        prefix, branch, targets = item, query, []
        if isinstance(message.readout, wire.Likelihood):
            targets = [query.view]
            prefix, branch = item[:-1], IntBuffer(np.concatenate([item[-1:], query.view[:-1]]))
        elif isinstance(message.readout, wire.Embedding) and mean_pooling:
            prefix, branch = item[:0], IntBuffer(np.concatenate([item, query.view]))
        request = ScoreRequest(
            id=f"{self.id}/{index}",
            prefix=prefix,
            caller=message.caller,
            size=len(item) + len(query),
            received=now,
            priority=message.priority,
            expires=None if message.deadline is None else now + message.deadline,
            readout=message.readout,
            rows=[[]],
            targets=targets,
            group=self,
            index=index,
        )
        request.branches = [Branch(request, 0, branch)]
        return request


def items_of(message: wire.ScoreItems) -> list[Ints]:
    """Return the token ids of each item, not copied."""
    ids = np.frombuffer(message.items, "<i4")
    ends = np.cumsum(np.frombuffer(message.lengths, "<i4")).tolist()
    return [ids[begin:end] for begin, end in pairwise([0, *ends])]
