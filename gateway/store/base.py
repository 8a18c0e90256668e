"""The key-value store: one interface, implemented in memory (``memory.py``) and in Redis (``redis.py``).

It has two kinds of values:

- *Cached* values are results of scores. They may be gone at any time, and reading or writing them never fails.
- *Kept* values are stored responses and registered items. They stay until they are removed or expire, and a store that does not
  answer raises :class:`Unavailable`.

Kept values lie in boxes: a :class:`Space` is one use of the store, with its bounds; in it, each owner has boxes; a box has entries,
in the order of their last change. Each change gives a box a new version: the time in microseconds, or more if that is not later
than the version before. An *epoch* tells a box from an earlier one of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

READ_BYTES = 2 << 20
"""Bytes of values after which a page ends."""
REMOVED_AT_ONCE = 500
"""Most entries that one call removes because they have expired, or to make room."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """One use of the store. The number of bytes counts names, values, and what each entry and each box takes besides."""

    name: str
    bytes: int
    """Most bytes of all owners together."""
    owner_bytes: int | None = None
    """Most bytes of one owner, if it may not have all."""
    entries: int
    """Most entries of all owners together."""
    entry_bytes: int
    box_bytes: int = 0
    seconds: float = 0
    """Time from the last change of an entry to its end, in boxes that were not created with another one; 0 for never."""
    evicts: bool = False
    """Whether the owner with most entries, or with most bytes, loses its oldest ones when there is no room. Such a space has one
    box for each owner, without a name. Otherwise new entries are refused."""


class Unavailable(Exception):
    """The store does not answer."""


class Missing(Exception):
    """There is no such box, or it was deleted meanwhile."""


class Full(Exception):
    """There is no room. What was stored before stays."""

    def __init__(self, most: int | None = None, *, owner: bool = False, stored: int = 0) -> None:
        """``most``: the bound, in bytes; None if the server has no memory left. ``owner``: whether the bound is that of one owner.
        ``stored``: entries of the call that were stored."""
        super().__init__()
        self.most = most
        self.owner = owner
        self.stored = stored


class Box(NamedTuple):
    """A box without its entries."""

    head: bytes
    """What the box was created with."""
    epoch: str
    version: int
    entries: int
    bytes: int
    value_bytes: int
    """Bytes of the values alone."""


class Found(NamedTuple):
    """Entries at one moment."""

    head: bytes
    epoch: str
    values: list[bytes | None]
    """None for a name without a value. Fewer than asked for if they have more than ``most_bytes``."""


class Page(NamedTuple):
    """Some entries, in the order of their last change."""

    entries: list[tuple[str, bytes]]
    """There may be fewer than asked for, also where more follow, but at least one then."""
    next: int | None
    """Version after which the next page begins; None at the end."""


class Written(NamedTuple):
    """The result of :meth:`Store.put`."""

    added: int
    changed: int
    version: int


class Totals(NamedTuple):
    """Contents of a space, of all owners."""

    boxes: int
    entries: int
    bytes: int


class Store(Protocol):
    """Methods for kept values raise :class:`Unavailable`, and :class:`Missing` if there is no box of that name (and epoch)."""

    async def cached(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return cached values. Keys have 16 bytes."""

    async def cache(self, values: Mapping[bytes, bytes]) -> None:
        """Store values as far as there is room. A key always has the same value."""

    async def check(self) -> None:
        """Raise :class:`Unavailable` if the store does not answer at present."""

    async def create(self, space: Space, owner: str, box: str, head: bytes, *, seconds: float = 0) -> None:
        """Create a box, unless there is one. ``seconds``: time to live of its entries. Raises :class:`Full`."""

    async def boxes(self, space: Space, owner: str) -> list[str]:
        """Return the names of the boxes that an owner has created, sorted."""

    async def describe(self, space: Space, owner: str, box: str) -> Box:
        """Return a box without its entries."""

    async def delete(self, space: Space, owner: str, box: str) -> None:
        """Delete a box and its entries."""

    async def put(
        self, space: Space, owner: str, entries: Sequence[tuple[str, bytes]], *, box: str = "", epoch: str | None = None
    ) -> Written:
        """Add or replace entries. Without an ``epoch``, a missing box is created. Raises :class:`Full`."""

    async def get(self, space: Space, owner: str, names: Sequence[str], *, box: str = "", most_bytes: int = READ_BYTES) -> Found:
        """Return entries as they are at a moment during the call. Reading ends with the value that exceeds ``most_bytes``."""

    async def page(self, space: Space, owner: str, after: int, count: int, *, box: str = "", epoch: str | None = None) -> Page:
        """Return up to ``count`` entries of the first that changed after the version ``after``."""

    async def remove(self, space: Space, owner: str, names: Sequence[str], *, box: str = "") -> int:
        """Remove entries. Return how many there were."""

    def totals(self, space: str) -> Totals:
        """Return what a space holds, in Redis at the last call for it."""
