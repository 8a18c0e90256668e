"""Composes the queries of many cached items at once.

In a step of a catalogue, hundreds of items are cached, and each needs the few tokens of its query. Composed one by one they took
more time of the host than the step takes on a GPU. The result is that of :class:`~engine.scheduling.composer.StepComposer`, which
composes all other items: those that are not cached, and those whose query does not fit the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from engine.batch import Batch, ExtendSegment
from engine.ints import EMPTY, Ints
from engine.kvcache.prefix_cache import Node
from engine.requests.item_group import ItemBlock, ItemGroup
from engine.scheduling.allocation import Allocator

Found = tuple[int, Node, list[Ints]]
"""A cached item: its place in the group, the node with which it ends, and the slots of the nodes on its path."""


def compose_block(batch: Batch, group: ItemGroup, room: int, allocator: Allocator) -> ItemBlock | None:
    """Add the queries of cached items of ``group`` to the step, as many as fit into ``room`` tokens. Return None, and change
    nothing, if there are none.

    Waiting items are looked up until as many are found as fit. Once all were looked up, only the first ones are looked up again, of
    which another request may have computed some: as many as would fit if all were cached.
    """
    if group.adapter is not None and not allocator.turns.takes(group):
        return None
    if group.item_images is not None and group.item_images.in_query:
        return None
    count = group.query.size
    found = _hold_cached(group, room // count, allocator)
    cache = allocator.kv_pool(group).cache
    while found and not allocator.has_room(group.on_lenvm, len(found) * count):
        cache.release(found.pop()[1], used=False)
        group.may_be_cached = True
    if not found:
        return None
    slots = allocator.allocate(len(found) * count, group, None, may_preempt=False)
    contexts = _contexts(found, list(slots.reshape(-1, count)))
    items = [group.cached(place, node, context) for (place, node, _), context in zip(found, contexts, strict=True)]
    block = ItemBlock(
        id=group.id,
        prefix=EMPTY,
        caller=group.caller,
        adapter=group.adapter,
        size=sum([item.size for item in items]),
        group=group,
        on_lenvm=group.on_lenvm,
        step=allocator.step,
        items=items,
        branches=[item.branches[0] for item in items],
        slots=slots,
    )
    segments = []
    for item, branch, context in zip(items, block.branches, contexts, strict=True):
        item.block = block
        segments.append(ExtendSegment(item, branch, branch.tokens.view, context))
    batch.extend(segments, slots.size, on_lenvm=group.on_lenvm)
    return block


def _hold_cached(group: ItemGroup, most: int, allocator: Allocator) -> list[Found]:
    """Hold the prefixes of up to ``most`` waiting items that are cached whole, within what is left to items."""
    cache, salt = allocator.kv_pool(group).cache, group.salt
    found: list[Found] = []
    left, held = allocator.left_to_items(group), cache.held_item_tokens
    for index in group.waiting if group.may_be_cached else group.waiting[:most]:
        if len(found) == most:
            break
        prefix = group.prefixes[index]
        cached = cache.find(salt, prefix) if prefix.size else None
        if cached is None:
            continue
        if prefix.size + (len(found) + 1) * group.query.size > left + held - cache.held_item_tokens:
            break
        cache.hold(cached[0])
        found.append((index, *cached))
    else:
        group.may_be_cached = False
    return found


def _contexts(found: list[Found], own: Sequence[Ints]) -> list[Ints]:
    """Return the slots of each item's path and, behind them, its ``own``."""
    parts = [[*slots, row] for (_, _, slots), row in zip(found, own, strict=True)]
    lengths = [sum([part.size for part in each]) for each in parts]
    slots = np.concatenate(list(chain.from_iterable(parts)))
    ends = list(accumulate(lengths))
    return [slots[end - length : end] for end, length in zip(ends, lengths, strict=True)]
