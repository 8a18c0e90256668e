"""Chooses which part of a prefix cache is evicted next.

Nodes of generations and queries are evicted in the order of their last use. Items of :class:`engine.wire.ScoreItems` compete by
how often they were used as well, so a scan of cold items does not evict hot ones. The rule is W-TinyLFU (Einziger, Friedman and
Manes, https://arxiv.org/abs/1512.00727): a new item enters a window; when slots are needed, the oldest item of the window competes
with the oldest one behind the window, and the one that was used less often lately is evicted.

Both kinds share all slots. While nodes that are no items have less than :data:`RESERVED_SHARE` of the slots, items are evicted
before them; above that, whichever was not used for longer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.kvcache.frequency import FrequencySketch

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node

WINDOW_SHARE = 0.05
"""Part of the items' tokens that the window has after the cache was filled for the first time."""
FILLED_SHARE = 0.5
"""Part of the items' tokens below which the admitted ones are few."""
RESERVED_SHARE = 0.25
"""Part of the slots that items never take from cached nodes of other kinds."""
TOKENS_PER_KEY = 8
"""Slots for each key that the frequency sketch is sized for: items that were evicted are remembered too."""

Valid = Callable[["Node"], bool]


class Queue:
    """Nodes that may be evicted, the least recently used first. Entries gone stale are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = itertools.count()

    def push(self, node: Node) -> None:
        """Add ``node`` with its present time of use."""
        heapq.heappush(self._heap, (node.used, next(self._ties), node))

    def first(self) -> Node | None:
        """Return the least recently used node that is evictable, or None."""
        while self._heap:
            used, _, node = self._heap[0]
            if node.evictable and node.used == used:
                return node
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the node that :meth:`first` has returned."""
        heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def rebuild(self, nodes: Iterable[Node]) -> None:
        """Hold exactly ``nodes``, without stale entries."""
        self._heap = [(node.used, next(self._ties), node) for node in nodes]
        heapq.heapify(self._heap)


class Evictor:
    """The order of eviction of one prefix cache."""

    def __init__(self, slots: int) -> None:
        self._reserved = int(RESERVED_SHARE * slots)
        self._sketch = FrequencySketch(slots // TOKENS_PER_KEY)
        self._others, self._window, self._main = Queue(), Queue(), Queue()
        self.other_tokens = 0
        """Tokens of nodes that are no items."""
        self.window_tokens = 0
        self.main_tokens = 0
        """Tokens of items in the window, and behind it."""

    def count(self, node: Node, tokens: int) -> None:
        """Note that ``node`` has ``tokens`` more; a negative number was removed."""
        if not node.item:
            self.other_tokens += tokens
        elif node.admitted:
            self.main_tokens += tokens
        else:
            self.window_tokens += tokens

    def use(self, node: Node) -> None:
        """Note that a request has used ``node``."""
        if node.item:
            self._sketch.use(node.key)

    def offer(self, node: Node) -> None:
        """Note that ``node`` can be evicted."""
        self._queue(node).push(node)

    def victim(self) -> Node | None:
        """Return the node to evict next; None if there is none."""
        other = self._others.first()
        self._fill()
        old = self._main.first() or self._window.first()
        if other is None or old is None:
            return self._item() if other is None else other
        if self.other_tokens > self._reserved and other.used < old.used:
            return other
        return self._item()

    def tidy(self, nodes: Callable[[], Iterable[Node]], count: int) -> None:
        """Drop stale entries if they are many. ``nodes``: all evictable nodes; ``count``: number of nodes of the cache."""
        queues = (self._others, self._window, self._main)
        if sum(map(len, queues)) <= 2 * count + 64:
            return
        sorted_out: dict[Queue, list[Node]] = {queue: [] for queue in queues}
        for node in nodes():
            sorted_out[self._queue(node)].append(node)
        for queue, members in sorted_out.items():
            queue.rebuild(members)

    def _queue(self, node: Node) -> Queue:
        if not node.item:
            return self._others
        return self._main if node.admitted else self._window

    def _fill(self) -> None:
        """Admit the items of the window, all but the newest, if few were admitted: there was room for all, so none had to compete."""
        if self.main_tokens >= FILLED_SHARE * self._item_tokens:
            return
        while self.window_tokens > WINDOW_SHARE * self._item_tokens and (node := self._window.first()) is not None:
            self._admit(node)

    @property
    def _item_tokens(self) -> int:
        return self.window_tokens + self.main_tokens

    def _item(self) -> Node | None:
        """Return the item to evict: the less frequently used of the window's oldest and the main part's oldest."""
        new, old = self._window.first(), self._main.first()
        if new is None or old is None:
            return new or old
        if self._sketch.count(new.key) <= self._sketch.count(old.key):
            return new
        self._admit(new)
        return old

    def _admit(self, node: Node) -> None:
        self._window.pop()
        self.count(node, -len(node.tokens))
        node.admitted = True
        self.count(node, len(node.tokens))
        self._main.push(node)
