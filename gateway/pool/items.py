"""Divides items, each of which one replica keeps in its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine import wire
from gateway.pool.placement import Placement, item_digests
from gateway.pool.prompts import Prompts, SubBatch
from gateway.pool.replica import ServedModel
from gateway.pool.split import split
from gateway.process.time_slices import TimeSlice
from gateway.text.prepared import Ids


async def divide_items(model: ServedModel, prompts: Prompts, items: Sequence[Ids]) -> list[SubBatch]:
    """Divide items by the replicas that keep them."""
    replicas, lengths = model.usable, [len(item) + len(prompts.suffix) for item in items]
    placement = Placement(replicas, sum(lengths))
    groups: list[list[int]] = [[] for _ in replicas]
    if len(replicas) == 1:
        groups, items = [[*range(len(items))]], ()
    time_slice = TimeSlice()
    for index, digest in enumerate(item_digests(items, prompts.caller.cache_salt, model.adapter_digest)):
        groups[placement.choose(digest, lengths[index])].append(index)
        if time_slice.over:
            await time_slice.yield_to_loop()
    row = wire.row_length(prompts.readout, prompts.suffix, model.info)
    return [
        SubBatch([group[index] for index in few], replica=replica)
        for replica, group in zip(replicas, groups, strict=True)
        if group
        for few in split(
            0,
            [lengths[index] for index in group],
            1,
            max_branches=model.info.limits.max_branches,
            row_length=row,
        )
    ]
