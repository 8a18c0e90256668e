"""Nodes of a prefix cache, and which of them is evicted next.

Nodes of generations and queries are evicted in the order of their last use. Items of :class:`engine.wire.ScoreItems` compete by
how often they were used as well, so a scan of cold items does not evict hot ones. Their rule is TinyLFU (Einziger, Friedman and
Manes, https://arxiv.org/abs/1512.00727): items are on probation until a request uses them again, also if they were evicted in
between. Then they are protected, as long as there is room. If there is none, an item takes the place of a protected item only if it
was used more often lately. Items on probation are evicted first, by last use, and then protected ones by how often they were used.

Both kinds share all slots. While nodes that are no items have less than a reserved share of the slots, items are evicted before
them; above that, whichever was not used for longer. Pinned items are held like those in use (:mod:`engine.kvcache.prefix_cache`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable

import numpy as np

from yardstick_llm.engine.ints import EMPTY, MASK_64, Ints

ROWS = 4
MAX_COUNT = 255


class FrequencySketch:
    """A count-min sketch with conservative update and aging: TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage
    2017, https://arxiv.org/abs/1512.00727). An estimate is never below the true count since the last halvings, up to
    :data:`MAX_COUNT`.
    """

    def __init__(self, keys: int) -> None:
        """``keys``: about as many as are used in turn. Takes 4 to 8 bytes for each."""
        self._width = 1 << max(6, (keys - 1).bit_length())
        self._rows = [bytearray(self._width) for _ in range(ROWS)]
        self._uses = 0

    def use(self, key: int) -> int:
        """Count one use of ``key``: 64 bits, spread evenly. Return its new count."""
        a, b, c, d = self._rows
        i, j, k, m = self._places(key)
        least = min(a[i], b[j], c[k], d[m])
        if least < MAX_COUNT:
            for row, place in ((a, i), (b, j), (c, k), (d, m)):
                if row[place] == least:
                    row[place] = least + 1
        self._uses += 1
        return min(least + 1, MAX_COUNT)

    def count(self, key: int) -> int:
        """Estimate the recent uses of ``key``."""
        a, b, c, d = self._rows
        i, j, k, m = self._places(key)
        return min(a[i], b[j], c[k], d[m])

    def raise_to(self, key: int, count: int) -> None:
        """Make the estimate for ``key`` at least ``count``, as if it had been used as often."""
        for row, place in zip(self._rows, self._places(key), strict=True):
            row[place] = max(row[place], count)

    def age(self, uses: int) -> bool:
        """Halve all counts after a number of uses, so that old uses fade. Return whether they were halved."""
        if self._uses < uses:
            return False
        for row in self._rows:
            counts = np.frombuffer(row, np.uint8)
            np.right_shift(counts, 1, out=counts)
        self._uses //= 2
        return True

    def _places(self, key: int) -> tuple[int, int, int, int]:
        # Rows use different bits; more than 16 are needed in wide rows, so bits from the other end are mixed in.
        mask = self._width - 1
        return (
            (key ^ key << 13) & mask,
            (key >> 16 ^ key << 29) & mask,
            (key >> 32 ^ key << 45) & mask,
            (key >> 48 ^ key << 61) & mask,
        )


PROTECTED_SHARE = 0.95
"""Part of the slots that protected items may have."""
MAX_KEYS = 1 << 20
"""Most keys that the frequency sketch is sized for. It has one for each slot, so that evicted items are remembered too."""

SAMPLE = 40
"""Uses for each cached node after which all counts are halved. More make the order of steady items better, and a change of what is
popular takes longer to be followed (docs/catalogue.md)."""
FEW_NODES = 64


class Node:
    """Consecutive tokens below a prefix, and their slots."""

    __slots__ = ("children", "item", "key", "parent", "protected", "queue", "references", "shared", "slots", "tokens", "used")

    def __init__(self, tokens: Ints, slots: Ints, parent: Node | None, *, shared: bool, item: bool = False) -> None:
        """``shared``: whether it is in the tree of a salt, not in that of one request. ``item``: whether it belongs to an item of
        :class:`engine.wire.ScoreItems`."""
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.shared = shared
        self.children: dict[int, Node] = {}
        self.references = 0
        self.used = 0
        self.item = item
        self.protected = False
        """Set by :class:`engine.kvcache.eviction.Evictor`, like :attr:`queue`."""
        self.queue: Queue | None = None
        """The queue of eviction that it is in."""
        self.key = path_key(self) if item else 0
        """On an item: :func:`path_key`, by which its uses are counted also while it is not cached."""

    @property
    def evictable(self) -> bool:
        """Whether it is a leaf that no request holds."""
        return not (self.references or self.children or self.parent is None)


class Root(Node):
    """The empty prefix of one tree. Each request at work in the tree holds one reference on it."""

    __slots__ = ("salt",)

    def __init__(self, salt: Hashable | None) -> None:
        """``salt`` None: the tree of one request, of which nothing is kept."""
        super().__init__(EMPTY, EMPTY, None, shared=salt is not None)
        self.salt = salt
        self.key = hash(salt) & MASK_64


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
