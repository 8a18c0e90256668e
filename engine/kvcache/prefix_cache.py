"""Prefix cache: radix trees over token ids that own the slots of every cached prefix.

Each node holds consecutive tokens and their slots; a path from the root spells a prefix. A request holds the path to its node by a
reference on every node of it. Nodes without references stay until their slots are needed; :mod:`engine.kvcache.eviction` chooses
the leaf that is evicted first. Tokens are inserted when the step that computes them is scheduled, not when it is done, so that
requests in the same step share them too.

There is one tree for each cache salt, so that a request never meets tokens of another salt, and one for each request that keeps
nothing. All trees compete for the same slots. A tree exists while it has tokens or a request works in it: at most one tree for
each slot and each running request.
"""

from __future__ import annotations

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
        """Tokens of items that a request holds."""
        self.evicted_item_tokens = 0

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
        """Evict everything that no request holds."""
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
