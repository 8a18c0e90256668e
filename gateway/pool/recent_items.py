"""The items that a gateway has sent to one engine, as far as they are worth moving when the engine leaves."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.text.prepared import Ids


@dataclass(slots=True)
class RecentItem:
    """One item."""

    ids: array[int]
    salt: str
    uses: int = 1
    pinned_until: float = 0.0
    """End of its pin, in seconds of the clock; 0 without one."""
    adapter: str = ""
    """Digest of the adapter that it was computed with; empty without one."""


class RecentItems:
    """The items that were used most recently, at most ``most_items`` with at most ``most_tokens`` together.

    An item that was used again gets a second turn before it is forgotten, so a scan of cold items does not displace hot ones.
    """

    def __init__(self, most_items: int = 0, most_tokens: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_items = most_items
        self._most_tokens = most_tokens
        self._clock = clock
        self._tokens = 0
        self._items: OrderedDict[int, RecentItem] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, digests: Sequence[int], items: Sequence[Ids], salt: str, pin_seconds: float | None, adapter: str = "") -> None:
        """Note that ``items`` were used. ``pin_seconds``: new time of their pins; None changes nothing."""
        if not self._most_items:
            return
        known, pinned_until = self._items, None if pin_seconds is None else self._clock() + pin_seconds
        for digest, ids in zip(digests, items, strict=True):
            item = known.get(digest)
            if item is None:
                item = known[digest] = RecentItem(ids if isinstance(ids, array) else array("I", ids), salt, adapter=adapter)
                self._tokens += len(item.ids)
            else:
                known.move_to_end(digest)
                item.uses += 1
            if pinned_until is not None:
                item.pinned_until = pinned_until
        while len(known) > self._most_items or self._tokens > self._most_tokens:
            digest, item = known.popitem(last=False)
            if item.uses > 1:
                item.uses, known[digest] = 1, item
            else:
                self._tokens -= len(item.ids)

    def take(self) -> list[RecentItem]:
        """Remove and return all items: pinned ones, those that were used more than once, and others; of each kind the last used one
        first."""
        pinned: list[RecentItem] = []
        repeated: list[RecentItem] = []
        others: list[RecentItem] = []
        now = self._clock()
        for item in reversed(self._items.values()):
            (pinned if item.pinned_until > now else repeated if item.uses > 1 else others).append(item)
        self._items.clear()
        self._tokens = 0
        return pinned + repeated + others
