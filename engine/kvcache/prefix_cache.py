"""Prefix cache: radix trees over token ids that own the slots of every cached prefix.

Each node holds consecutive tokens and their slots; a path from the root spells a prefix. A request holds the path to its node by a
reference on every node of it. Nodes without references stay until their slots are needed; :mod:`engine.kvcache.eviction` chooses
the leaf that is evicted first. Tokens are inserted when the step that computes them is scheduled, not when it is done, so that
requests in the same step share them too.

There is one tree for each cache salt, so that a request never meets tokens of another salt, and one for each request that keeps
nothing. All trees compete for the same slots. A tree exists while it has tokens or a request works in it: at most one tree for
each slot and each running request.

Pins are prefixes that are not evicted for some time. A pin holds a path of the cache as a running request does. It ends by itself,
so that what nobody renews can be evicted: an item that was changed or deleted, or the items of a gateway that is gone. Pins have a
share of the slots; what finds no room is simply not pinned.

All salts share this room. A salt may take more than an equal part of it while others leave it; a salt that has less than its equal
part takes room back from the salt with the most pinned tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator

import numpy as np

from yardstick_llm.engine.ints import Ints, as_ints, common_length
from yardstick_llm.engine.kvcache.eviction import Evictor, Node, Root


class SlotPool:
    """Allocates and frees slot numbers. It does not know their contents.

    Free slots are a stack in one array, so both calls copy one slice, whatever the size of the pool.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._stack: Ints = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.available = size

    def allocate(self, count: int) -> Ints:
        """``count`` slots. The caller has checked that as many are available."""
        assert 0 <= count <= self.available, (count, self.available)
        self.available -= count
        found = self._stack[self.available : self.available + count]
        return found.copy() if count == 1 else found[::-1].copy()

    def free(self, slots: Ints) -> None:
        """Return ``slots`` to the pool."""
        end = self.available + len(slots)
        assert end <= self.size, "a slot was released twice"
        self._stack[self.available : end] = slots[::-1]
        self.available = end

    @property
    def free_slots(self) -> Ints:
        """The numbers of the free slots, for integrity checks."""
        return self._stack[: self.available]


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

    def set(self, node: Node | None, tokens: int, seconds: float, now: float) -> bool:
        """Pin the prefix of ``tokens`` that ends with ``node`` for ``seconds`` from ``now``, in place of an earlier pin; 0 seconds
        remove its pin. Return whether it is pinned now.

        The caller holds a reference on ``node``. A prefix in the tree of one request is never pinned: nothing of it is kept.
        """
        if node is None or node.parent is None or not node.shared:
            return False
        if seconds <= 0:
            self.remove(node)
            return False
        root, until = node.root, now + seconds
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


class PrefixCache:
    """Shares slots between requests with a common prefix. Not thread-safe: the loop owns it."""

    def __init__(self, pool: SlotPool, reserved: int = 0) -> None:
        """``reserved``: see :class:`Evictor`."""
        self._pool = pool
        self._clock = itertools.count(1)
        self._evictor = Evictor(pool.size, reserved)
        self.root = Root("")
        """Tree of requests without a salt. It always exists, and references on its root are not counted."""
        self._roots: dict[Hashable, Root] = {"": self.root}
        self._private: set[Root] = set()
        self._count = 0
        self.evictable = 0
        """Tokens that no request holds."""
        self.item_tokens = 0
        """Tokens of items."""
        self.held_item_tokens = 0
        """Tokens of items that a request or a pin holds."""
        self.evicted_item_tokens = 0
        self.pins = Pins(self)

    def acquire_root(self, salt: Hashable | None) -> Root:
        """Return the root of the tree of ``salt``, with a new reference. None: a private tree whose slots :meth:`release` frees at
        once."""
        if salt == "":
            return self.root
        root = None if salt is None else self._roots.get(salt)
        if root is None:
            root = Root(salt)
            if salt is None:
                self._private.add(root)
            else:
                self._roots[salt] = root
        root.references += 1
        return root

    def matched_length(self, salt: Hashable | None, tokens: Ints) -> int:
        """Number of leading ``tokens`` that the tree of ``salt`` has. Changes nothing."""
        node: Node | None = None if salt is None else self._roots.get(salt)
        matched = 0
        while node is not None and matched < len(tokens):
            node = node.children.get(int(tokens[matched]))
            if node is not None:
                length = common_length(node.tokens, tokens[matched:])
                matched += length
                node = node if length == len(node.tokens) else None
        return matched

    def find(self, salt: Hashable | None, tokens: Ints) -> tuple[Node, list[Ints]] | None:
        """Return the node with which ``tokens``, at least one, end in the tree of ``salt``, and the slots of its path. None where
        no node ends there. Changes nothing."""
        node: Node | None = None if salt is None else self._roots.get(salt)
        found: list[Ints] = []
        matched, size = 0, tokens.size
        while node is not None and matched < size:
            node = node.children.get(int(tokens[matched]))
            if node is not None:
                end = matched + node.tokens.size
                if end > size or tokens[matched:end].tobytes() != node.tokens.tobytes():
                    return None
                found.append(node.slots)
                matched = end
        return None if node is None else (node, found)

    def match_prefix(self, node: Node, tokens: Ints) -> tuple[Node, Ints]:
        """Move a reference on ``node`` down along ``tokens`` as far as the tree has them.

        Returns the node reached, which holds the reference now, and the slots of the tokens passed.
        """
        found: list[Ints] = []
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                break
            length = common_length(child.tokens, tokens)
            if length < len(child.tokens):
                child = self._split(child, length)
            self._hold(child)
            found.append(child.slots)
            tokens = tokens[length:]
            node = child
        return node, as_ints(found)

    def insert(self, node: Node, tokens: Ints, slots: Ints, *, item: bool = False) -> Node:
        """Insert ``tokens`` below the referenced ``node``. :meth:`match_prefix` has found none of them.

        The tree owns ``slots`` from now on. ``item``: see :class:`Node`. Returns the new node, to which the reference has moved.
        """
        assert len(tokens) == len(slots) > 0
        assert int(tokens[0]) not in node.children
        child = Node(np.array(tokens, np.int32), np.array(slots, np.int32), node, shared=node.shared, item=item and node.shared)
        node.children[int(tokens[0])] = child
        child.references = 1
        self._count += 1
        self._add_tokens(child, len(tokens))
        self.held_item_tokens += len(tokens) if child.item else 0
        return child

    def hold(self, node: Node) -> None:
        """Add one reference on each node of the path from the root down to ``node``."""
        step = node
        while (parent := step.parent) is not None:
            self._hold(step)
            step = parent
        if step is not self.root:
            step.references += 1

    def release(self, *nodes: Node, above: Node | None = None, used: bool = True) -> None:
        """Drop one reference on each node of the path down to each of ``nodes``: from the root, or from below ``above``.

        ``used``: whether this counts as a use. Slots of a private tree are free at once.
        """
        now = next(self._clock)
        for node in nodes:
            self._release(node, above, now, used=used)
        self._evictor.tidy(self._count)

    def _release(self, node: Node, above: Node | None, now: int, *, used: bool) -> None:
        step = node
        while step is not above and (parent := step.parent) is not None:
            assert step.references > 0
            step.references -= 1
            if used:
                step.used = now
                self._evictor.use(step)
            if step.references == 0:
                size = step.tokens.size
                self.evictable += size
                self.held_item_tokens -= size if step.item else 0
                if not step.shared:
                    self._remove(step)
                elif not step.children:
                    self._evictor.offer(step)
            step = parent
        if above is None and step is not self.root:
            assert step.references > 0
            step.references -= 1
            self._drop_if_empty(step)

    def adopt(self, node: Node, tokens: Ints, slots: Ints) -> None:
        """Keep a finished branch below the referenced ``node``: insert the tokens that the tree lacks, free the slots of the
        others.
        """
        reached, known = self.match_prefix(node, tokens)
        self._pool.free(slots[: len(known)])
        if len(known) < len(tokens):
            reached = self.insert(reached, tokens[len(known) :], slots[len(known) :])
        self.release(reached, above=node)

    def evict(self, count: int) -> int:
        """Free at least ``count`` slots, or as many as can be evicted. Returns how many."""
        freed = 0
        while freed < count and (node := self._evictor.victim()) is not None:
            freed += len(node.tokens)
            self.evicted_item_tokens += len(node.tokens) if node.item else 0
            self._remove(node)
        return freed

    def clear(self) -> None:
        """Evict everything that no request holds, pinned or not."""
        self.pins.clear()
        self.evict(self.evictable)

    def nodes(self) -> Iterator[Node]:
        """All nodes except roots, for integrity checks."""
        stack = [node for root in self.roots for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def roots(self) -> list[Root]:
        """The roots of all trees, for integrity checks."""
        return [*self._roots.values(), *self._private]

    def _hold(self, node: Node) -> None:
        if node.references == 0:
            size = node.tokens.size
            self.evictable -= size
            self.held_item_tokens += size if node.item else 0
        node.references += 1

    def _split(self, node: Node, length: int) -> Node:
        """Put a new node above ``node`` that takes its first ``length`` tokens; ``node`` stays the lower part, so that references
        held by requests go on meaning the same tokens."""
        assert node.parent is not None
        upper = Node(node.tokens[:length], node.slots[:length], node.parent, shared=node.shared, item=node.item)
        upper.references, upper.used, upper.protected = node.references, node.used, node.protected
        self._evictor.divide(node, upper)
        node.parent.children[int(upper.tokens[0])] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:]
        upper.children[int(node.tokens[0])] = node
        self._count += 1
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._pool.free(node.slots)
        self.evictable -= len(node.tokens)
        self._add_tokens(node, -len(node.tokens))
        del parent.children[int(node.tokens[0])]
        node.parent = None
        self._count -= 1
        if parent.parent is None:
            self._drop_if_empty(parent)
        elif not (parent.references or parent.children):
            self._evictor.offer(parent)

    def _add_tokens(self, node: Node, count: int) -> None:
        """Count tokens of a node that enters the tree; a negative number leaves it."""
        self.item_tokens += count if node.item else 0
        self._evictor.count(node, count)

    def _drop_if_empty(self, root: Node) -> None:
        if root.references or root.children or root is self.root:
            return
        assert isinstance(root, Root)
        if root.salt is None:
            self._private.discard(root)
        else:
            del self._roots[root.salt]
