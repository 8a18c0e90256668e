"""Chooses which part of a prefix cache is evicted next.

Nodes of generations and queries are evicted in the order of their last use. Items of :class:`engine.wire.ScoreItems` compete by
how often they were used as well, so a scan of cold items does not evict hot ones. Their rule is TinyLFU (Einziger, Friedman and
Manes, https://arxiv.org/abs/1512.00727): items are on probation until a request uses them again, also if they were evicted in
between. Then they are protected, as long as there is room. If there is none, an item takes the place of a protected item only if it
was used more often lately. Items on probation are evicted first, by last use, and then protected ones by how often they were used.

Both kinds share all slots. While nodes that are no items have less than a reserved share of the slots, items are evicted before
them; above that, whichever was not used for longer. Pinned items are held like those in use (:mod:`engine.kvcache.pins`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.kvcache.frequency import FrequencySketch

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node

PROTECTED_SHARE = 0.95
"""Part of the slots that protected items may have."""
MAX_KEYS = 1 << 20
"""Most keys that the frequency sketch is sized for. It has one for each slot, so that evicted items are remembered too."""

SAMPLE = 40
"""Uses for each cached node after which all counts are halved. More make the order of steady items better, and a change of what is
popular takes longer to be followed (docs/catalogue.md)."""
FEW_NODES = 64


class Queue:
    """Nodes that may be evicted, that with the lowest count and then the least recently used first. Entries gone stale are
    skipped."""

    def __init__(self, count: Callable[[Node], int] = lambda _: 0, *, protected: bool = False) -> None:
        """``count``: how often a node was used lately. ``protected``: whether the nodes are protected; a node that changes this
        leaves the queue."""
        self._count = count
        self._protected = protected
        self.heap: list[tuple[int, int, int, Node]] = []
        """Read only."""
        self._ties = itertools.count()

    def push(self, node: Node) -> None:
        """Add ``node`` with its present count and time of use."""
        heapq.heappush(self.heap, self._entry(node))

    def first(self) -> Node | None:
        """Return the first node that is evictable, or None."""
        while self.heap:
            _, used, _, node = self.heap[0]
            if node.evictable and node.used == used and node.protected == self._protected:
                return node
            heapq.heappop(self.heap)
        return None

    def rebuild(self, nodes: Iterable[Node]) -> None:
        """Hold exactly ``nodes``, without stale entries."""
        self.heap = [self._entry(node) for node in nodes]
        heapq.heapify(self.heap)

    def _entry(self, node: Node) -> tuple[int, int, int, Node]:
        return self._count(node), node.used, next(self._ties), node


class Evictor:
    """The order of eviction of one prefix cache."""

    def __init__(self, slots: int, reserved: int) -> None:
        """``reserved``: slots that items never take from cached nodes of other kinds."""
        self._reserved = reserved
        self._room = int(PROTECTED_SHARE * slots)
        """Tokens that may be protected."""
        self._sketch = FrequencySketch(min(slots, MAX_KEYS))
        self._others, self._probation = Queue(), Queue()
        self._protected = Queue(lambda node: self._sketch.count(node.key), protected=True)
        self._other_tokens = 0
        self._protected_tokens = 0

    def count(self, node: Node, tokens: int) -> None:
        """Note that ``node`` has ``tokens`` more; a negative number was removed."""
        if not node.item:
            self._other_tokens += tokens
        elif node.protected:
            self._protected_tokens += tokens

    def use(self, node: Node) -> None:
        """Note that a request has used ``node``."""
        if node.item:
            count = self._sketch.use(node.key)
            if count > 1 and not node.protected:
                self._protect(node, count)

    def offer(self, node: Node) -> None:
        """Note that ``node`` can be evicted."""
        self._queue(node).push(node)

    def victim(self) -> Node | None:
        """Return the node to evict next; None if there is none."""
        item, other = self._probation.first() or self._protected.first(), self._others.first()
        if item is None or other is None:
            return item or other
        return other if self._other_tokens > self._reserved and other.used < item.used else item

    def tidy(self, nodes: Callable[[], Iterable[Node]], count: int) -> None:
        """Let old uses fade, and drop stale entries if they are many. ``nodes``: all evictable nodes; ``count``: number of nodes of
        the cache."""
        queues = (self._others, self._probation, self._protected)
        stale = len(self._others.heap) + len(self._probation.heap) + len(self._protected.heap) > 2 * count + FEW_NODES
        if not (self._sketch.age(SAMPLE * max(count, FEW_NODES)) or stale):
            return
        members: dict[Queue, list[Node]] = {queue: [] for queue in queues}
        for node in nodes():
            members[self._queue(node)].append(node)
        for queue in queues:
            queue.rebuild(members[queue])

    def _queue(self, node: Node) -> Queue:
        if not node.item:
            return self._others
        return self._protected if node.protected else self._probation

    def _protect(self, node: Node, count: int) -> None:
        """Protect ``node``, which was used ``count`` times lately, if there is room or it can take the room of others."""
        while self._protected_tokens + len(node.tokens) > self._room:
            old = self._protected.first()
            if old is None or self._sketch.count(old.key) >= count:
                return
            self._move(old, protected=False)
            self._probation.push(old)
        self._move(node, protected=True)

    def _move(self, node: Node, *, protected: bool) -> None:
        self._protected_tokens += len(node.tokens) if protected else -len(node.tokens)
        node.protected = protected
