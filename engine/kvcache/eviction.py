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
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.ints import MASK_64
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
    """Nodes that may be evicted, that with the lowest count and then the least recently used first.

    A node stays in the queue while it is used again; its entry is corrected when it becomes the first. Counts must not fall.
    """

    def __init__(self, count: Callable[[Node], int] = lambda _: 0) -> None:
        """``count``: how often a node was used lately."""
        self._count = count
        self._heap: list[tuple[int, int, int, Node]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Add ``node``, which leaves the queue that it was in."""
        if node.queue is not self:
            node.queue = self
            heapq.heappush(self._heap, self._entry(node))

    def first(self) -> Node | None:
        """Return the first node that is evictable, or None."""
        while self._heap:
            count, used, _, node = self._heap[0]
            if node.queue is not self or not node.evictable:
                heapq.heappop(self._heap)
                if node.queue is self:
                    node.queue = None
            elif node.used == used and self._count(node) == count:
                return node
            else:
                heapq.heapreplace(self._heap, self._entry(node))
        return None

    def rebuild(self) -> None:
        """Correct all entries, also after counts fell, and drop those of nodes that have left."""
        nodes = dict.fromkeys(node for *_, node in self._heap if node.queue is self and node.parent is not None)
        self._heap = [self._entry(node) for node in nodes]
        heapq.heapify(self._heap)

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
        self._protected = Queue(lambda node: self._sketch.count(node.key))
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

    def divide(self, node: Node, upper: Node) -> None:
        """Note that ``upper`` is now the beginning of ``node``: it was used as often."""
        if node.item:
            self._sketch.raise_to(upper.key, self._sketch.count(node.key))

    def offer(self, node: Node) -> None:
        """Note that ``node`` can be evicted."""
        queue = self._queue(node)
        if node.queue is not queue:
            queue.push(node)

    def victim(self) -> Node | None:
        """Return the node to evict next; None if there is none."""
        item, other = self._probation.first() or self._protected.first(), self._others.first()
        if item is None or other is None:
            return item or other
        return other if self._other_tokens > self._reserved and other.used < item.used else item

    def tidy(self, count: int) -> None:
        """Let old uses fade, and drop entries of nodes that have left if they are many. ``count``: number of nodes of the cache."""
        queues = self._others, self._probation, self._protected
        many = len(self._others) + len(self._probation) + len(self._protected) > 2 * count + FEW_NODES
        if self._sketch.age(SAMPLE * max(count, FEW_NODES)) or many:
            for queue in queues:
                queue.rebuild()

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


def path_key(node: Node) -> int:
    """Hash of the salt and of all tokens down to the end of ``node``: 64 bits.

    It does not depend on where the nodes of the path begin. So an item keeps its count of uses when another item with the same
    beginning divides it, and when a step inserts it in other parts than before.
    """
    parts = [node.tokens.tobytes()]
    while (parent := node.parent) is not None:
        node = parent
        parts.append(node.tokens.tobytes())
    return hash((node.key, b"".join(reversed(parts)))) & MASK_64
