"""Catalogues in the memory of one gateway."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

import msgspec

from gateway.catalogues.freeing import Waste
from gateway.catalogues.order import ChangeOrder
from gateway.catalogues.record import digest_of, expiry_of, tokens_of, with_expiry
from gateway.catalogues.store import (
    CATALOGUE_BYTES,
    ITEM_BYTES,
    PAGE_ITEMS,
    PURGED_AT_ONCE,
    Found,
    Full,
    Missing,
    Page,
    Spec,
    State,
    WarmUp,
    Written,
    check_size,
    lives,
    without_expired,
)
from gateway.settings import CatalogueBounds

EXAMINED_AT_ONCE = 2000
"""Items that a page passes over before other requests run, in about a millisecond."""


class _Entry(msgspec.Struct, frozen=True, gc=False):  # a full collection of garbage skips it
    record: bytes
    version: int


class _Catalogue:
    """A catalogue in memory."""

    def __init__(self, spec: Spec, version: int) -> None:
        self.spec = spec
        self.epoch = secrets.token_hex(8)
        self.version = version
        self.items: dict[str, _Entry] = {}
        self.order = ChangeOrder()  # it is the order of expiry too
        self.bytes = CATALOGUE_BYTES
        self.tokens = 0
        self.warmed: int | None = None
        self.warm_up: WarmUp | None = None


class MemoryCatalogues:
    """Catalogues in memory. They are lost when the gateway ends, and other gateways do not see them."""

    def __init__(self, bounds: CatalogueBounds, clock: Callable[[], float] = time.time) -> None:
        self._bounds = bounds
        self._clock = clock
        self._owners: dict[str, dict[str, _Catalogue]] = {}
        self._bytes: dict[str, int] = {}
        self._waste = Waste()
        self.bytes = 0
        """Bytes of all catalogues."""

    @property
    def catalogues(self) -> int:
        """Number of catalogues."""
        return sum(map(len, self._owners.values()))

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(len(catalogue.items) for catalogues in self._owners.values() for catalogue in catalogues.values())

    async def create(self, owner: str, name: str, spec: Spec) -> State:
        """See :class:`CatalogueStore`."""
        catalogues = self._owners.get(owner, {})
        if name not in catalogues:
            self._check_room(owner, CATALOGUE_BYTES, stored=0)
            self._owners.setdefault(owner, {})[name] = _Catalogue(spec, 0)
            self._grow(owner, CATALOGUE_BYTES)
        return await self.state(owner, name)

    async def state(self, owner: str, name: str) -> State:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name)
        self._purge(owner, catalogue)
        return State(
            name=name,
            spec=catalogue.spec,
            epoch=catalogue.epoch,
            version=catalogue.version,
            items=len(catalogue.items),
            bytes=catalogue.bytes,
            tokens=catalogue.tokens,
            warmed=catalogue.warmed,
            warm_up=catalogue.warm_up,
        )

    async def names(self, owner: str) -> list[str]:
        """See :class:`CatalogueStore`."""
        return sorted(self._owners.get(owner, {}))

    async def put(self, owner: str, name: str, epoch: str, items: Sequence[tuple[str, bytes]], expires: int) -> Written:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name, epoch)
        added = changed = 0
        for stored, (id, record) in enumerate(items):
            if stored % PURGED_AT_ONCE == 0:  # as many expired items leave as new ones come
                self._purge(owner, catalogue)
            known = catalogue.items.get(id)
            same = known is not None and digest_of(known.record) == digest_of(record)
            if known is not None and same and expiry_of(known.record) == expires:
                continue
            growth = len(record) - len(known.record) if known is not None else _size(id, record)
            self._check_room(owner, growth, stored=stored)
            if known is not None:
                self._drop(owner, catalogue, id)
            added += known is None
            changed += known is not None and not same
            catalogue.version += 1
            catalogue.items[id] = _Entry(with_expiry(record, expires), catalogue.version)
            catalogue.order.add(catalogue.version, id)
            catalogue.tokens += tokens_of(record)
            self._count(owner, catalogue, _size(id, record))
        return Written(added, changed, len(items) - added - changed, catalogue.version)

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name)
        records = [None if entry is None else entry.record for entry in map(catalogue.items.get, ids)]
        if catalogue.spec.ttl_seconds is not None:
            records = without_expired(records, int(self._clock() * 1000))
        check_size(records)
        return Found(catalogue.spec, catalogue.epoch, catalogue.version, records)

    async def pages(self, owner: str, name: str, epoch: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """See :class:`CatalogueStore`."""
        after: int | None = 0
        while after is not None:
            page = await self._page(owner, name, after, PAGE_ITEMS, epoch)
            if page.items:
                yield page.items
            after = page.next

    async def page(self, owner: str, name: str, after: int, count: int) -> Page:
        """See :class:`CatalogueStore`."""
        return await self._page(owner, name, after, count)

    async def _page(self, owner: str, name: str, after: int, count: int, epoch: str | None = None) -> Page:
        found: list[tuple[str, bytes]] = []
        while True:
            catalogue, now = self._find(owner, name, epoch), int(self._clock() * 1000)
            few = list(islice(catalogue.order.after(after), EXAMINED_AT_ONCE))
            for version, id in few:
                record = catalogue.items[id].record
                if lives(record, now):
                    found.append((id, record))
                if len(found) == count:
                    return Page(found, version)
            if len(few) < EXAMINED_AT_ONCE:
                return Page(found, None)
            after = few[-1][0]
            await asyncio.sleep(0)

    async def remove(self, owner: str, name: str, ids: Sequence[str]) -> int:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name)
        self._purge(owner, catalogue)
        there = [id for id in dict.fromkeys(ids) if id in catalogue.items]
        for id in there:
            self._drop(owner, catalogue, id)
            catalogue.version += 1
        return len(there)

    async def delete(self, owner: str, name: str) -> None:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name)
        del self._owners[owner][name]
        self._grow(owner, -catalogue.bytes)
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]
        self._waste.add(catalogue.items, *catalogue.order.clear())

    async def note_warm_up(self, owner: str, name: str, epoch: str, warm_up: WarmUp, warmed: int | None = None) -> None:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name, epoch)
        catalogue.warm_up = warm_up
        catalogue.warmed = catalogue.warmed if warmed is None else warmed

    def _find(self, owner: str, name: str, epoch: str | None = None) -> _Catalogue:
        catalogue = self._owners.get(owner, {}).get(name)
        if catalogue is None or epoch not in (None, catalogue.epoch):
            raise Missing
        return catalogue

    def _purge(self, owner: str, catalogue: _Catalogue) -> None:
        """Remove expired items."""
        now = int(self._clock() * 1000)
        for _ in range(PURGED_AT_ONCE):
            oldest = catalogue.order.oldest
            if oldest is None or lives(catalogue.items[oldest].record, now):
                return
            self._drop(owner, catalogue, oldest)
            catalogue.version += 1

    def _drop(self, owner: str, catalogue: _Catalogue, id: str) -> None:
        entry = catalogue.items.pop(id)
        record, version = entry.record, entry.version
        catalogue.order.remove(version)
        catalogue.tokens -= tokens_of(record)
        self._count(owner, catalogue, -_size(id, record))

    def _check_room(self, owner: str, growth: int, *, stored: int) -> None:
        """Raise :class:`Full`."""
        if growth <= 0:
            return
        if self._bytes.get(owner, 0) + growth > self._bounds.group_bytes:
            raise Full(self._bounds.group_bytes, group=True, stored=stored)
        if self.bytes + growth > self._bounds.bytes:
            raise Full(self._bounds.bytes, group=False, stored=stored)

    def _count(self, owner: str, catalogue: _Catalogue, size: int) -> None:
        catalogue.bytes += size
        self._grow(owner, size)

    def _grow(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self.bytes += size


def _size(id: str, record: bytes) -> int:
    """Return the bytes that an item takes."""
    return ITEM_BYTES + len(id) + len(record)
