"""Pins: prefixes of a prefix cache that are not evicted for some time.

A pin holds a path of the cache as a running request does. It ends by itself, so that what nobody renews can be evicted: an item
that was changed or deleted, or the items of a gateway that is gone. Pins have a share of the slots; what finds no room is simply
not pinned.

All salts share this room. A salt may take more than an equal part of it while others leave it; a salt that has less than its equal
part takes room back from the salt with the most pinned tokens.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node, PrefixCache


class _Held:
    """The pins of one salt."""

    def __init__(self) -> None:
        self.tokens = 0
        self.nodes: dict[Node, None] = {}
        """Pinned nodes, in the order in which they were pinned or renewed."""


class Pins:
    """The pins of one prefix cache."""

    def __init__(self, cache: PrefixCache, room: int = 0) -> None:
        self._cache = cache
        self.room = room
        """Most tokens that may be pinned."""
        self.tokens = 0
        """Tokens that are pinned. A beginning that several pinned prefixes share counts for each."""
        self.displaced = 0
        """Pins that were removed for those of another salt."""
        self._until: dict[Node, tuple[float, int]] = {}
        """End of each pin, in seconds of the caller's clock, and its tokens."""
        self._held: dict[Node, _Held] = {}
        """Pins of each salt that has any, by the root of its tree."""
        self._ends: list[tuple[float, int, Node]] = []
        """Heap of all ends; those of pins that were renewed or removed are stale."""
        self._ties = itertools.count()

    def pin(self, node: Node, tokens: int, until: float) -> bool:
        """Pin the prefix of ``tokens`` that ends with ``node``, or change the end of its pin. Return whether it is pinned now.

        The caller holds a reference on ``node``, in the tree of a salt.
        """
        root = node.root
        if node not in self._until:
            if not self._make_room(root, tokens):
                return False
            self._cache.hold(node)
            self.tokens += tokens
            self._held.setdefault(root, _Held()).tokens += tokens
        self._until[node] = until, tokens
        held = self._held[root]
        held.nodes.pop(node, None)
        held.nodes[node] = None
        heapq.heappush(self._ends, (until, next(self._ties), node))
        if len(self._ends) > 2 * len(self._until) + 64:
            self._ends = [(end, next(self._ties), other) for other, (end, _) in self._until.items()]
            heapq.heapify(self._ends)
        return True

    def set(self, node: Node | None, tokens: int, seconds: float, now: float) -> bool:
        """:meth:`pin` the prefix for ``seconds`` from ``now``, or remove its pin for 0 seconds. Return whether it is pinned now.

        A prefix in the tree of one request is never pinned, because nothing of it is kept.
        """
        if node is None or node.parent is None or not node.shared:
            return False
        if seconds > 0:
            return self.pin(node, tokens, now + seconds)
        self.remove(node)
        return False

    def remove(self, node: Node) -> None:
        """Remove the pin of the prefix that ends with ``node``, if there is one."""
        if node in self._until:
            tokens = self._until.pop(node)[1]
            self.tokens -= tokens
            held = self._held[node.root]
            held.tokens -= tokens
            del held.nodes[node]
            if not held.nodes:
                del self._held[node.root]
            self._cache.release(node, used=False)

    def expire(self, now: float) -> None:
        """Remove the pins whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            self._remove_first()

    def give_way(self) -> bool:
        """Remove the pin that would end first; return whether there was one."""
        count = len(self._until)
        while self._ends and len(self._until) == count:
            self._remove_first()
        return len(self._until) < count

    def clear(self) -> None:
        """Remove all pins."""
        for node in list(self._until):
            self.remove(node)
        self._ends.clear()

    def _make_room(self, root: Node, tokens: int) -> bool:
        """Return whether ``tokens`` more of the salt of ``root`` have room.

        A salt takes room from others only within its equal part; another salt then has more than its own.
        """
        own = self._held[root].tokens if root in self._held else 0
        salts = len(self._held) + (root not in self._held)
        if self.tokens + tokens > self.room and own + tokens > self.room // salts:
            return False
        while self.tokens + tokens > self.room:
            largest = max(self._held.values(), key=lambda held: held.tokens)
            self.remove(next(iter(largest.nodes)))
            self.displaced += 1
        return True

    def _remove_first(self) -> None:
        end, _, node = heapq.heappop(self._ends)
        if node in self._until and self._until[node][0] == end:
            self.remove(node)
