"""The store of catalogues: a protocol, implemented in memory (``memory.py``) and in Redis (``shared.py``).

A catalogue belongs to an owner, which is the trust group of an API key. Its model and template never change; its items do. Each
change of an item gives the catalogue a new version, a number that only grows. An *epoch* tells a catalogue from an earlier one of
the same name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from gateway.catalogues.record import expiry_of
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


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The unchangeable properties of a catalogue."""

    model: str
    text: str
    """Key of the model's tokeniser and template; items are of no use to another tokeniser."""
    template: Template
    labels: list[str] = []
    label_ids: list[int] = []
    ttl_seconds: float | None = None
    preset: str = ""
    """Name of the model's preset that template, labels and the formula of a rank come from; empty for a catalogue with its own."""


class WarmUp(msgspec.Struct, frozen=True, kw_only=True):
    """A warm-up of a catalogue, as far as it has come."""

    model: str
    state: Literal["running", "done", "stopped"]
    """A warm-up whose gateway was killed stays ``running``, with an old time."""
    items: int
    total: int
    cached_items: int
    computed_tokens: int
    pinned_items: int
    updated: int
    """Time of this report, in seconds since 1970."""


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
    warm_up: WarmUp | None = None
    """The last warm-up."""


class Found(NamedTuple):
    """Items of a catalogue at one moment."""

    spec: Spec
    epoch: str
    version: int
    records: list[bytes | None]
    """None for an id without an item."""


class Page(NamedTuple):
    """Some items of a catalogue, in the order of their last change."""

    items: list[tuple[str, bytes]]
    """Ids and records. There may be fewer than asked for, also where more follow."""
    next: int | None
    """Version after which the next page begins; None at the end."""


class Written(NamedTuple):
    """The result of a registration."""

    added: int
    changed: int
    unchanged: int
    version: int


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

    def __init__(self, most: int | None, *, group: bool = False, stored: int = 0) -> None:
        """``most``: the bound, in bytes; None if the store's server has no memory left. ``group``: whose the bound is; ``stored``:
        items of the call that were stored."""
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
        """Yield all items in pages of :data:`PAGE_ITEMS` at most. Each item that is there all the time comes at least once; one
        that changes meanwhile may come again."""
        ...

    async def page(self, owner: str, name: str, after: int, count: int) -> Page:
        """Return up to ``count`` of the first items that changed after version ``after``; at least one if there are any."""
        ...

    async def remove(self, owner: str, name: str, ids: Sequence[str]) -> int:
        """Remove items. Return how many there were."""
        ...

    async def delete(self, owner: str, name: str) -> None:
        """Remove a catalogue and its items."""
        ...

    async def note_warm_up(self, owner: str, name: str, epoch: str, warm_up: WarmUp, warmed: int | None = None) -> None:
        """Note how far a warm-up has come, and with ``warmed`` the version of which all items were warmed."""
        ...


def check_size(records: Iterable[bytes | None]) -> None:
    """Raise :class:`TooLarge` if the records of a request take too much memory."""
    if sum(map(len, filter(None, records))) > MOST_READ:
        raise TooLarge(MOST_READ)


def without_expired(records: Iterable[bytes | None], now: int) -> list[bytes | None]:
    """Return ``records`` with None in place of those that have expired. ``now``: milliseconds since 1970."""
    return [record if record is not None and lives(record, now) else None for record in records]


def lives(record: bytes, now: int) -> bool:
    expires = expiry_of(record)
    return not expires or expires > now
