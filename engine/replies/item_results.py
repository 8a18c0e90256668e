"""Results of items: rows, pins, and the answer when all items of a group are done."""

from __future__ import annotations

from collections.abc import Sequence

from engine import wire
from engine.replies.counters import Counters
from engine.requests.core import ScoringRequest
from engine.requests.item_group import ItemGroup
from engine.scheduling.scheduler import Scheduler


class ItemResults:
    """Takes the rows of items."""

    def __init__(self, scheduler: Scheduler, counters: Counters) -> None:
        self._scheduler = scheduler
        self._counters = counters

    def take(self, group: ItemGroup, done: Sequence[tuple[ScoringRequest, list[float]]]) -> list[wire.Reply]:
        """Take the rows of items of ``group`` that a step has computed, all of each block; return the answer with the last one."""
        if group.message.pin_seconds is not None:
            for request, _ in done:
                self._pin(group, request, group.message.pin_seconds)
        group.take(done)
        for part in dict.fromkeys(request.block or request for request, _ in done):
            self._scheduler.finish_items(part)
        if group.left:
            return []
        self._scheduler.remove(group)
        self._counters.scored_items += len(group.rows)
        self._counters.cached_items += group.cached_items
        if not group.on_lenvm:
            self._counters.cached_tokens += group.cached_tokens
        return [group.answer]

    def _pin(self, group: ItemGroup, request: ScoringRequest, seconds: float) -> None:
        """Pin or unpin an item that its request still holds."""
        if self._scheduler.pin(request, seconds):
            group.pinned_items += 1
        elif seconds > 0 and request.salt is not None and len(request.prefix):
            self._counters.unpinned_items += 1
