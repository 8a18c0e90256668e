"""Messages that score items, from their queueing to their answer."""

from __future__ import annotations

from engine import wire
from engine.core import Request, ScoreRequest
from engine.counters import Counters
from engine.item_group import ItemGroup
from engine.scheduling.scheduler import Scheduler


class ItemGroups:
    """The groups whose message is not answered yet."""

    def __init__(self, scheduler: Scheduler, counters: Counters) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._groups: dict[str, ItemGroup] = {}

    def get(self, message_id: str) -> ItemGroup | None:
        """Return the group of a message, or None if it was answered."""
        return self._groups.get(message_id)

    @property
    def waiting(self) -> int:
        """Number of requests that are not admitted; those of one group count as one."""
        return self._scheduler.waiting - self._scheduler.waiting_items + len(self._groups)

    def begin(self, message: wire.ScoreItems, now: float, *, mean_pooling: bool) -> None:
        """Queue the items of a message, at least one. See :meth:`ItemGroup.of`."""
        group = self._groups[message.id] = ItemGroup.of(message, now, mean_pooling=mean_pooling)
        for request in group.requests:
            self._scheduler.add(request)

    def pin(self, group: ItemGroup, request: ScoreRequest) -> None:
        """Pin or unpin the item of a request whose result is there and which still holds it, if the message asks for it."""
        seconds = group.pin_seconds
        if seconds is None:
            return
        if self._scheduler.pin(request, seconds):
            group.pinned_items += 1
        elif seconds > 0 and request.salt is not None and len(request.prefix):
            self._counters.unpinned_items += 1

    def take(self, group: ItemGroup, request: ScoreRequest, row: list[float]) -> list[wire.Reply]:
        """Take the row of one item; return the answer with the last one."""
        answer = group.take(request, row)
        if not request.on_lenvm:
            self._counters.cached_tokens += request.cached_tokens
        if answer is None:
            return []
        del self._groups[group.id]
        self._counters.scored_items += len(answer.rows)
        self._counters.cached_items += answer.cached_items
        return [answer]

    def end(self, ended: list[Request]) -> list[Request]:
        """End the groups of items among the ``ended`` requests: their other items are not computed. Return the requests to answer,
        one for each message."""
        answered = []
        for request in ended:
            group = request.group if isinstance(request, ScoreRequest) else None
            if group is not None:
                if self._groups.pop(group.id, None) is None:
                    continue
                for other in group.requests:
                    if self._scheduler.get(other.id) is other:
                        self._scheduler.remove(other)
            answered.append(request)
        return answered
