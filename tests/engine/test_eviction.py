"""Which items leave a full prefix cache: uses are counted by content, wherever nodes of the tree begin."""

from __future__ import annotations

import numpy as np

from engine.ints import Ints
from engine.kvcache.prefix_cache import Node, PrefixCache, SlotPool

HEAD, TAIL = 30, 150


class Cache:
    """A prefix cache that keeps items."""

    def __init__(self, slots: int) -> None:
        self.pool = SlotPool(slots)
        self.cache = PrefixCache(self.pool)

    def use(self, item: Ints, *ends: int, salt: str = "") -> Node:
        """Use an item once, as a request does. Steps that insert what is missing end at ``ends``."""
        node, found = self.cache.match_prefix(self.cache.acquire_root(salt), item)
        begin = len(found)
        for end in [*(end for end in ends if end < len(item)), len(item)]:
            if end > begin:
                self.cache.evict(end - begin - self.pool.available)
                node = self.cache.insert(node, item[begin:end], self.pool.allocate(end - begin), item=True)
                begin = end
        self.cache.release(node)
        return node

    def uses(self, node: Node) -> int:
        """Recent uses of an item as the cache estimates them."""
        return self.cache._evictor._sketch.count(node.key)

    def has(self, item: Ints) -> bool:
        return self.cache.matched_length("", item) == len(item)


def similar(count: int, seed: int = 0) -> list[Ints]:
    """Items with the same first tokens. The first tokens behind them differ."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 1 << 17, HEAD, np.int32)
    return [np.array([*head, number, *rng.integers(0, 1 << 17, TAIL - 1)], np.int32) for number in range(count)]


def test_an_item_keeps_its_uses_when_a_similar_one_divides_it() -> None:
    found, (hot, other) = Cache(2000), similar(2)
    for _ in range(10):
        found.use(hot)
    found.use(other)
    node = found.use(hot)
    assert len(node.tokens) == TAIL, "the common beginning is a node of its own"
    assert (found.uses(node), node.protected) == (11, True)
    assert node.parent is not None
    assert found.uses(node.parent) == 12, "the beginning was used with both"


def test_an_evicted_item_comes_back_with_its_uses() -> None:
    """Twice: below the beginning that a similar item kept, and in other parts than before."""
    found, (hot, other) = Cache(HEAD + 2 * TAIL + 20), similar(2)
    for _ in range(10):
        found.use(hot)
    for _ in range(12):
        found.use(other)
    found.cache.evict(TAIL)
    assert (found.has(hot), found.has(other)) == (False, True)
    node = found.use(hot)
    assert (found.uses(node), node.protected) == (11, True)
    found.cache.clear()
    node = found.use(hot, 20, 90)
    assert (len(node.tokens), found.uses(node), node.protected) == (HEAD + TAIL - 90, 12, True)


def test_a_scan_leaves_hot_items_with_a_common_beginning() -> None:
    """Each hot item is computed again once in between, below the beginning that the others kept."""
    items = similar(40)
    hot, cold = items[:5], items[5:]
    found = Cache(HEAD + 8 * TAIL)
    for _ in range(6):
        for item in hot:
            found.use(item)
    for item in hot:
        found.cache._remove(found.use(item))
        found.use(item)
    for item in cold:
        found.use(item)
    assert [found.has(item) for item in hot] == [True] * 5
