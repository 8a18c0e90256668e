"""The items that a gateway has sent to each engine, as far as they are worth moving when the engine leaves."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from gateway.text.image_ids import ID_BYTES
from gateway.text.prepared import Ids, PlacedIds

ITEM_BYTES = 210
"""Memory of an item besides 4 bytes for each of its tokens (CPython 3.11: 207 to 212)."""

FORGOTTEN_BYTES = 1 << 16
"""Bytes of one engine that are forgotten before another may have most."""


class RecentItem(msgspec.Struct, gc=False):
    """One item. There may be 200,000, so a full collection of garbage must not visit them."""

    content: bytes
    """Token ids, as an array."""
    salt: str
    uses: int = 1
    pinned_until: float = 0.0
    """End of its pin, in seconds of the clock; 0 without one."""
    adapter: str = ""
    """Digest of the adapter that it was computed with; empty without one."""
    place: int | None = None
    """See :class:`PlacedIds`; None for an item that is not registered."""

    @property
    def ids(self) -> array[int]:
        """Token ids."""
        if self.place is None:
            return array("I", self.content)
        row = PlacedIds("I", self.content)
        row.content, row.place = self.content, self.place
        return row

    @property
    def tokens(self) -> int:
        """Number of token ids."""
        return len(self.content) // ID_BYTES


class Room:
    """The memory that the items of all engines share."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: dict[RecentItems, int] = {}
        self.bytes = 0
        """Bytes of the items of all engines."""

    def note(self, items: RecentItems, size: int) -> None:
        """Note that ``items`` have ``size`` bytes now. Forget items of the engine that has most until all fit, so engines that are
        used alike have equal parts."""
        self._set(items, size)
        while self.bytes > self._most_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            largest.forget(min(self.bytes - self._most_bytes, FORGOTTEN_BYTES))
            self._set(largest, largest.bytes)

    def _set(self, items: RecentItems, size: int) -> None:
        self.bytes += size - self._sizes.pop(items, 0)
        if size:
            self._sizes[items] = size


class RecentItems:
    """The items that were used most recently, at most ``most_items``.

    An item that was used again gets a second turn before it is forgotten, so a scan of cold items does not displace hot ones.
    """

    def __init__(self, most_items: int = 0, room: Room | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``room``: shared with other engines; None for no bound of the memory."""
        self._most_items = most_items
        self._clock = clock
        self._room = room
        self._tokens = 0
        self._items: OrderedDict[int, RecentItem] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def enabled(self) -> bool:
        """Whether items are remembered at all."""
        return self._most_items > 0

    @property
    def bytes(self) -> int:
        """Memory of the items."""
        return 4 * self._tokens + ITEM_BYTES * len(self._items)

    def add(self, digests: Sequence[int], items: Sequence[Ids], salt: str, pin_seconds: float | None, adapter: str = "") -> None:
        """Note that ``items`` were used. ``pin_seconds``: new time of their pins; None changes nothing."""
        if not self.enabled:
            return
        known, pinned_until = self._items, None if pin_seconds is None else self._clock() + pin_seconds
        for digest, ids in zip(digests, items, strict=True):
            item = known.get(digest)
            if item is None:
                content = (ids if isinstance(ids, array) else array("I", ids)).tobytes()
                place = ids.place if isinstance(ids, PlacedIds) else None
                item = known[digest] = RecentItem(content, salt, adapter=adapter, place=place)
                self._tokens += item.tokens
            else:
                known.move_to_end(digest)
                item.uses += 1
            if pinned_until is not None:
                item.pinned_until = pinned_until
        while len(known) > self._most_items:
            self._forget_first()
        if self._room is not None:
            self._room.note(self, self.bytes)

    def forget(self, size: int) -> None:
        """Forget items of at least ``size`` bytes together, or all."""
        most = self.bytes - size
        while self._items and self.bytes > most:
            self._forget_first()

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
        if self._room is not None:
            self._room.note(self, 0)
        return pinned + repeated + others

    def close(self) -> None:
        """Remember nothing more, and leave the room: the engine is gone. A handover may still take what is there."""
        self._most_items = 0
        if self._room is not None:
            self._room.note(self, 0)

    def _forget_first(self) -> None:
        """Forget the item that was used last longest ago, or let it have its second turn."""
        digest, item = self._items.popitem(last=False)
        if item.uses > 1:
            item.uses, self._items[digest] = 1, item
        else:
            self._tokens -= item.tokens
