"""The store of catalogues: a protocol, and a store in the memory of one gateway.

A catalogue belongs to an owner, which is the trust group of an API key. Its model and template never change; its items do. Each
change of an item gives the catalogue a new version, a number that only grows. An *epoch* tells a catalogue from an earlier one of
the same name.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from gateway.catalogues.record import digest_of, expiry_of, tokens_of, with_expiry
from gateway.text.catalogue import Template

ITEM_BYTES = 320
"""Bytes that an item takes besides its id and its record; this also bounds the number of tiny items."""
CATALOGUE_BYTES = 32 << 10
"""Bytes that a catalogue takes besides its items: more than its template and labels have."""
PAGE_ITEMS = 500
"""Items of a page of :meth:`CatalogueStore.pages`."""
MOST_READ = 32 << 20
"""Most bytes of the items that a request names."""
PURGED_AT_ONCE = 500
"""Most expired items that one call removes."""

FREED_AT_ONCE = 5000


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a catalogue is created with."""

    model: str
    text: str
    """Key of the model's tokeniser and template; items are of no use to another tokeniser."""
    template: Template
    labels: list[str] = []
    label_ids: list[int] = []
    ttl_seconds: float | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue without its items."""

    name: str
    spec: Spec
    epoch: str
    version: int
    items: int
    bytes: int
    tokens: int
    warmed: int | None
    """Version that was warmed."""


class Found(NamedTuple):
    """Items of a catalogue at one moment."""

    spec: Spec
    epoch: str
    version: int
    records: list[bytes | None]
    """None for an id without an item."""


class Written(NamedTuple):
    """The result of a registration."""

    added: int
    changed: int
    unchanged: int
    version: int


class StoreBounds(NamedTuple):
    """Bounds of a store, in bytes."""

    group_bytes: int
    """Of the catalogues of one owner."""
    bytes: int
    """Of all catalogues."""


class Unavailable(Exception):
    """The store does not answer."""


class Missing(Exception):
    """There is no such catalogue, or it was deleted meanwhile."""


class TooLarge(Exception):
    """Items have more bytes than a request may have."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most


class Full(Exception):
    """There is no room. What was registered before stays."""

    def __init__(self, most: int, *, group: bool, stored: int) -> None:
        """``most``: the bound, in bytes; ``group``: whose it is; ``stored``: items of the call that were stored."""
        super().__init__()
        self.most = most
        self.group = group
        self.stored = stored


class CatalogueStore(Protocol):
    """Keeps catalogues. Every method may raise :class:`Unavailable`; those about one catalogue raise :class:`Missing`."""

    async def create(self, owner: str, name: str, spec: Spec) -> State:
        """Create a catalogue, or return the one that exists, which may have another spec. Raises :class:`Full`."""
        ...

    async def state(self, owner: str, name: str) -> State:
        """Return a catalogue without its items."""
        ...

    async def names(self, owner: str) -> list[str]:
        """Return the names of all catalogues of ``owner``, sorted."""
        ...

    async def put(self, owner: str, name: str, epoch: str, items: Sequence[tuple[str, bytes]], expires: int) -> Written:
        """Add or replace items: ids and records. ``expires``: milliseconds since 1970, not before that of earlier calls; 0 for
        never. Raises :class:`Full`."""
        ...

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """Return items as they are at a moment during the call: an update that was confirmed before the call is seen. Raises
        :class:`TooLarge`."""
        ...

    def pages(self, owner: str, name: str, epoch: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """Yield all items in pages. Each item that is there all the time comes at least once; one that changes meanwhile may come
        again."""
        ...

    async def page(self, owner: str, name: str, after: int, count: int) -> list[tuple[str, int, bytes]]:
        """Return id, version and record of the first ``count`` items that changed after version ``after``, in order of change."""
        ...

    async def remove(self, owner: str, name: str, ids: Sequence[str]) -> int:
        """Remove items. Return how many there were."""
        ...

    async def delete(self, owner: str, name: str) -> None:
        """Remove a catalogue and its items."""
        ...

    async def warmed(self, owner: str, name: str, epoch: str, version: int) -> None:
        """Note that all items of ``version`` were warmed."""
        ...


class _Entry(NamedTuple):
    record: bytes
    version: int


class _Catalogue:
    """A catalogue in memory."""

    def __init__(self, spec: Spec, version: int) -> None:
        self.spec = spec
        self.epoch = secrets.token_hex(8)
        self.version = version
        self.items: OrderedDict[str, _Entry] = OrderedDict()  # in order of change, which is that of expiry
        self.bytes = CATALOGUE_BYTES
        self.tokens = 0
        self.warmed: int | None = None


class MemoryCatalogues:
    """Catalogues in memory. They are lost when the gateway ends, and other gateways do not see them."""

    def __init__(self, bounds: StoreBounds, clock: Callable[[], float] = time.time) -> None:
        self._bounds = bounds
        self._clock = clock
        self._owners: dict[str, dict[str, _Catalogue]] = {}
        self._bytes: dict[str, int] = {}
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
        )

    async def names(self, owner: str) -> list[str]:
        """See :class:`CatalogueStore`."""
        return sorted(self._owners.get(owner, {}))

    async def put(self, owner: str, name: str, epoch: str, items: Sequence[tuple[str, bytes]], expires: int) -> Written:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name, epoch)
        self._purge(owner, catalogue)
        added = changed = 0
        for stored, (id, record) in enumerate(items):
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
            catalogue.tokens += tokens_of(record)
            self._count(owner, catalogue, _size(id, record))
        return Written(added, changed, len(items) - added - changed, catalogue.version)

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """See :class:`CatalogueStore`."""
        catalogue, now = self._find(owner, name), int(self._clock() * 1000)
        entries = map(catalogue.items.get, ids)
        records = [entry.record if entry is not None and lives(entry.record, now) else None for entry in entries]
        check_size(records)
        return Found(catalogue.spec, catalogue.epoch, catalogue.version, records)

    async def pages(self, owner: str, name: str, epoch: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """See :class:`CatalogueStore`."""
        catalogue = self._find(owner, name, epoch)
        ids = list(catalogue.items)
        for begin in range(0, len(ids), PAGE_ITEMS):
            catalogue, now = self._find(owner, name, epoch), int(self._clock() * 1000)
            found = ((id, catalogue.items.get(id)) for id in ids[begin : begin + PAGE_ITEMS])
            yield [(id, entry.record) for id, entry in found if entry is not None and lives(entry.record, now)]

    async def page(self, owner: str, name: str, after: int, count: int) -> list[tuple[str, int, bytes]]:
        """See :class:`CatalogueStore`."""
        catalogue, now = self._find(owner, name), int(self._clock() * 1000)
        ids = list(catalogue.items)
        begin = bisect.bisect_right(ids, after, key=lambda id: catalogue.items[id].version)
        found = ((id, catalogue.items[id]) for id in itertools.islice(ids, begin, None))
        live = ((id, entry.version, entry.record) for id, entry in found if lives(entry.record, now))
        return list(itertools.islice(live, count))

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
        while catalogue.items:  # freeing many at once would block the event loop
            for _ in range(min(FREED_AT_ONCE, len(catalogue.items))):
                catalogue.items.popitem()
            await asyncio.sleep(0)

    async def warmed(self, owner: str, name: str, epoch: str, version: int) -> None:
        """See :class:`CatalogueStore`."""
        self._find(owner, name, epoch).warmed = version

    def _find(self, owner: str, name: str, epoch: str | None = None) -> _Catalogue:
        catalogue = self._owners.get(owner, {}).get(name)
        if catalogue is None or epoch not in (None, catalogue.epoch):
            raise Missing
        return catalogue

    def _purge(self, owner: str, catalogue: _Catalogue) -> None:
        """Remove expired items."""
        now = int(self._clock() * 1000)
        for _ in range(PURGED_AT_ONCE):
            oldest = next(iter(catalogue.items.items()), None)
            if oldest is None or lives(oldest[1].record, now):
                return
            self._drop(owner, catalogue, oldest[0])
            catalogue.version += 1

    def _drop(self, owner: str, catalogue: _Catalogue, id: str) -> None:
        record = catalogue.items.pop(id).record
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


def check_size(records: Iterable[bytes | None]) -> None:
    """Raise :class:`TooLarge` if the records of a request take too much memory."""
    if sum(len(record) for record in records if record is not None) > MOST_READ:
        raise TooLarge(MOST_READ)


def lives(record: bytes, now: int) -> bool:
    expires = expiry_of(record)
    return not expires or expires > now
