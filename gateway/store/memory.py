"""The store in the memory of one gateway. Its values are lost when the gateway ends, and other gateways do not see them."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from yardstick_llm.gateway.store.base import READ_BYTES, REMOVED_AT_ONCE, Box, Found, Full, Missing, Page, Space, Totals, Written

CACHED_BYTES = 230
"""Bytes that a cached value takes besides its own, measured with CPython 3.11: a 16-byte key, its slot in the ordered dictionary,
and an empty value."""


class _Entry(msgspec.Struct, frozen=True, gc=False):  # a full collection of garbage skips it
    value: bytes
    version: int


class _Box:
    def __init__(self, head: bytes, seconds: float, epoch: str) -> None:
        self.head = head
        self.seconds = seconds
        self.epoch = epoch
        self.version = 0
        self.entries: dict[str, _Entry] = {}
        """In the order of their last change."""
        self.bytes = 0
        self.value_bytes = 0

    def next_version(self, now: int) -> int:
        self.version = max(now, self.version + 1)
        return self.version

    def lives(self, entry: _Entry, now: int) -> bool:
        return not self.seconds or entry.version > now - self.seconds * 1_000_000


class _Owner:
    def __init__(self) -> None:
        self.boxes: dict[str, _Box] = {}
        self.entries = 0
        self.bytes = 0


class _Owners(dict[str, _Owner]):
    """A space, with its totals."""

    entries = 0
    bytes = 0

    def count(self, owner: _Owner, box: _Box, entries: int, size: int, value_bytes: int = 0) -> None:
        box.bytes += size
        box.value_bytes += value_bytes
        owner.entries += entries
        owner.bytes += size
        self.entries += entries
        self.bytes += size


class MemoryStore:
    """A :class:`~gateway.store.base.Store` in memory. Cached values take at most about ``cache_bytes``, and those that were used
    least recently go first."""

    def __init__(self, cache_entries: int = 0, cache_bytes: int = 0, clock: Callable[[], float] = time.time) -> None:
        """``cache_entries``: most cached values; if one of the bounds is 0, there are none."""
        self._cache_entries = cache_entries
        self._most_cached = cache_bytes
        self._cached: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self.cached_bytes = 0
        self._spaces: defaultdict[str, _Owners] = defaultdict(_Owners)
        self._clock = clock

    async def cached(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See :class:`Store`."""
        values = [self._cached.get(key) for key in keys]
        for key, value in zip(keys, values, strict=True):
            if value is not None:
                self._cached.move_to_end(key)
        return values

    async def cache(self, values: Mapping[bytes, bytes]) -> None:
        """See :class:`Store`."""
        for key, value in values.items():
            if key not in self._cached:
                self._cached[key] = value
                self.cached_bytes += CACHED_BYTES + len(value)
        while len(self._cached) > self._cache_entries or self.cached_bytes > self._most_cached:
            self.cached_bytes -= CACHED_BYTES + len(self._cached.popitem(last=False)[1])

    async def check(self) -> None:
        """Memory is always available."""

    async def create(self, space: Space, owner: str, box: str, head: bytes, *, seconds: float = 0) -> None:
        """See :class:`Store`."""
        owners = self._spaces[space.name]
        if owner in owners and box in owners[owner].boxes:
            return
        self._make_room(space, owner, space.box_bytes, 0, stored=0)
        created = owners.setdefault(owner, _Owner())
        created.boxes[box] = _Box(head, seconds, secrets.token_hex(8))
        owners.count(created, created.boxes[box], 0, space.box_bytes)

    async def boxes(self, space: Space, owner: str) -> list[str]:
        """See :class:`Store`."""
        owners = self._spaces[space.name]
        return sorted(owners[owner].boxes) if owner in owners else []

    async def describe(self, space: Space, owner: str, box: str) -> Box:
        """See :class:`Store`."""
        holder, found = self._find(space, owner, box)
        self._purge(space, holder, found)
        return Box(found.head, found.epoch, found.version, len(found.entries), found.bytes, found.value_bytes)

    async def delete(self, space: Space, owner: str, box: str) -> None:
        """See :class:`Store`."""
        holder, found = self._find(space, owner, box)
        self._spaces[space.name].count(holder, found, -len(found.entries), -found.bytes)
        del holder.boxes[box]
        if not holder.boxes:
            del self._spaces[space.name][owner]

    async def put(
        self, space: Space, owner: str, entries: Sequence[tuple[str, bytes]], *, box: str = "", epoch: str | None = None
    ) -> Written:
        """See :class:`Store`."""
        if epoch is None:
            self._spaces[space.name].setdefault(owner, _Owner()).boxes.setdefault(box, _Box(b"", space.seconds, ""))
        holder, found = self._find(space, owner, box, epoch)
        added = changed = 0
        for stored, (name, value) in enumerate(entries):
            if stored % REMOVED_AT_ONCE == 0:  # as many expired entries leave as new ones come
                self._purge(space, holder, found)
            known = found.entries.get(name)
            same = known is not None and known.value == value
            if same and not found.seconds:
                continue
            growth = len(value) - len(known.value) if known is not None else space.entry_bytes + len(name) + len(value)
            self._make_room(space, owner, growth, known is None, stored=stored)
            if name in found.entries:
                self._remove(space, holder, found, name)
            found.entries[name] = _Entry(value, found.next_version(self._now()))
            self._spaces[space.name].count(holder, found, 1, space.entry_bytes + len(name) + len(value), len(value))
            added += known is None
            changed += known is not None and not same
        return Written(added, changed, found.version)

    async def get(self, space: Space, owner: str, names: Sequence[str], *, box: str = "", most_bytes: int = READ_BYTES) -> Found:
        """See :class:`Store`."""
        _, found = self._find(space, owner, box)
        values: list[bytes | None] = []
        size, now = 0, self._now()
        for entry in map(found.entries.get, names):
            values.append(entry.value if entry is not None and found.lives(entry, now) else None)
            size += len(values[-1] or b"")
            if size > most_bytes:
                break
        return Found(found.head, found.epoch, values)

    async def page(self, space: Space, owner: str, after: int, count: int, *, box: str = "", epoch: str | None = None) -> Page:
        """See :class:`Store`."""
        holder, found = self._find(space, owner, box, epoch)
        self._purge(space, holder, found)
        place = bisect_right([*found.entries.values()], after, key=lambda entry: entry.version)
        entries: list[tuple[str, bytes]] = []
        size, now = 0, self._now()
        for name, entry in islice(found.entries.items(), place, None):
            if len(entries) == count or size > READ_BYTES:
                return Page(entries, after)
            after = entry.version
            if found.lives(entry, now):
                entries.append((name, entry.value))
                size += len(entry.value)
        return Page(entries, None)

    async def remove(self, space: Space, owner: str, names: Sequence[str], *, box: str = "") -> int:
        """See :class:`Store`."""
        holder, found = self._find(space, owner, box)
        self._purge(space, holder, found)
        there = [name for name in dict.fromkeys(names) if name in found.entries]
        for name in there:
            self._remove(space, holder, found, name)
            found.next_version(self._now())
        return len(there)

    def totals(self, space: str) -> Totals:
        """See :class:`Store`."""
        owners = self._spaces[space]
        return Totals(sum(len(owner.boxes) for owner in owners.values()), owners.entries, owners.bytes)

    def _find(self, space: Space, owner: str, box: str, epoch: str | None = None) -> tuple[_Owner, _Box]:
        holder = self._spaces[space.name].get(owner)
        found = None if holder is None else holder.boxes.get(box)
        if holder is None or found is None or epoch not in (None, found.epoch):
            raise Missing
        return holder, found

    def _purge(self, space: Space, holder: _Owner, box: _Box) -> None:
        """Remove entries that have expired."""
        now = self._now()
        for _ in range(REMOVED_AT_ONCE if box.seconds else 0):
            oldest = next(iter(box.entries), None)
            if oldest is None or box.lives(box.entries[oldest], now):
                return
            self._remove(space, holder, box, oldest)
            box.next_version(now)

    def _remove(self, space: Space, holder: _Owner, box: _Box, name: str) -> None:
        value = box.entries.pop(name).value
        self._spaces[space.name].count(holder, box, -1, -(space.entry_bytes + len(name) + len(value)), -len(value))

    def _make_room(self, space: Space, owner: str, size: int, entries: int, *, stored: int) -> None:
        """Remove entries for ``size`` bytes and one entry or none more, where the space allows it. Raises :class:`Full`."""
        owners = self._spaces[space.name]
        if size <= 0:
            return
        if space.owner_bytes is not None and (owners[owner].bytes if owner in owners else 0) + size > space.owner_bytes:
            raise Full(space.owner_bytes, owner=True, stored=stored)
        for _ in range(REMOVED_AT_ONCE):
            many = owners.entries + entries > space.entries
            if not many and owners.bytes + size <= space.bytes:
                return
            if not space.evicts or not owners.entries:
                break
            largest = max(owners.values(), key=lambda each: each.entries if many else each.bytes)
            (box,) = largest.boxes.values()
            self._remove(space, largest, box, next(iter(box.entries)))
        raise Full(space.bytes, stored=stored)

    def _now(self) -> int:
        return int(self._clock() * 1_000_000)
