"""Pins: prefixes of a prefix cache that are not evicted for some time.

A pin holds a path of the cache as a running request does. It ends by itself, so that what nobody renews can be evicted: an item
that was changed or deleted, or the items of a gateway that is gone. Pins have a share of the slots; what finds no room is simply
not pinned.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.kvcache.prefix_cache import Node, PrefixCache


class Pins:
    """The pins of one prefix cache."""

    def __init__(self, cache: PrefixCache, room: int = 0) -> None:
        self._cache = cache
        self.room = room
        """Most tokens that may be pinned."""
        self.tokens = 0
        """Tokens that are pinned. A beginning that several pinned prefixes share counts for each."""
        self._until: dict[Node, tuple[float, int]] = {}
        """End of each pin, in seconds of the caller's clock, and its tokens."""
        self._ends: list[tuple[float, int, Node]] = []
        """Heap of all ends; those of pins that were renewed or removed are stale."""
        self._ties = itertools.count()

    def pin(self, node: Node, tokens: int, until: float) -> bool:
        """Pin the prefix of ``tokens`` that ends with ``node``, or change the end of its pin. Return whether it is pinned now.

        The caller holds a reference on ``node``, in the tree of a salt.
        """
        if node not in self._until:
            if self.tokens + tokens > self.room:
                return False
            self._cache.hold(node)
            self.tokens += tokens
        self._until[node] = until, tokens
        heapq.heappush(self._ends, (until, next(self._ties), node))
        if len(self._ends) > 2 * len(self._until) + 64:
            self._ends = [(end, next(self._ties), other) for other, (end, _) in self._until.items()]
            heapq.heapify(self._ends)
        return True

    def remove(self, node: Node) -> None:
        """Remove the pin of the prefix that ends with ``node``, if there is one."""
        if node in self._until:
            self.tokens -= self._until.pop(node)[1]
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

    def _remove_first(self) -> None:
        end, _, node = heapq.heappop(self._ends)
        if node in self._until and self._until[node][0] == end:
            self.remove(node)
