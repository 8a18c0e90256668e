"""Catalogues of registered items: their bounds, owners, permissions, and errors for clients.

A catalogue is a box of the gateway's store. It belongs to the trust group of an API key. Its model and template never change; its
items do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from litestar.connection import ASGIConnection

from gateway.catalogues.record import HEADER_BYTES
from gateway.errors import CatalogueNotFound, Conflict, InvalidRequest, ItemNotFound, NotPermitted, StoreFull, StoreUnavailable
from gateway.http.context import RequestContext
from gateway.ops.metrics import Telemetry
from gateway.pool.replica import ServedModel
from gateway.settings import Settings
from gateway.store.base import Box, Full, Missing, Space, Store, Unavailable
from gateway.text.catalogue import Template
from gateway.text.prepared import ID_BYTES

ITEM_BYTES = 320
"""Bytes that an item takes besides its id and its record; this also bounds the number of tiny items."""
CATALOGUE_BYTES = 32 << 10
"""Bytes that a catalogue takes besides its items: more than its template and labels have."""
GROUP_SHARE = 2
"""A group of keys may have this part of the room: half of it."""
MOST_READ = 32 << 20
"""Most bytes of the items that a request names."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHOWN_IDS = 5
"""Most unknown ids that an error message lists."""


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


class State(NamedTuple):
    """A catalogue without its items."""

    name: str
    spec: Spec
    box: Box

    @property
    def tokens(self) -> int:
        """Stored tokens of the items. Four bytes of texts whose tokens depend on the query count as one."""
        return (self.box.value_bytes - HEADER_BYTES * self.box.entries) // ID_BYTES

    @property
    def version(self) -> str:
        """The version as clients see it."""
        return f"{self.box.epoch}-{self.box.version}"


_spec_decoder = msgspec.msgpack.Decoder(Spec)


def catalogue_space(settings: Settings) -> Space:
    """Return the bounds of catalogues."""
    return Space(
        name="catalogues",
        bytes=settings.catalogue_bytes,
        owner_bytes=settings.catalogue_bytes // GROUP_SHARE,
        entries=settings.catalogue_bytes // ITEM_BYTES,
        entry_bytes=ITEM_BYTES,
        box_bytes=CATALOGUE_BYTES,
    )


@dataclass(frozen=True)
class Catalogues:
    """The catalogues of all trust groups."""

    store: Store
    space: Space
    telemetry: Telemetry

    async def create(self, owner: str, name: str, spec: Spec) -> State:
        """Create a catalogue, or return the one that exists, which may have another spec. Raises :class:`StoreFull`."""
        with self.errors(name):
            await self.store.create(self.space, owner, name, msgspec.msgpack.encode(spec), seconds=spec.ttl_seconds or 0)
        return await self.describe(owner, name)

    async def describe(self, owner: str, name: str) -> State:
        """Return a catalogue without its items. Raises :class:`CatalogueNotFound`, :class:`StoreUnavailable`."""
        with self.errors(name):
            box = await self.store.describe(self.space, owner, name)
        return State(name, _spec_decoder.decode(box.head), box)

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> tuple[Spec, list[bytes]]:
        """Return a catalogue's spec, and the records of items as they are at a moment during the call: an update that was confirmed
        before the call is seen. Raises as :meth:`describe`, and :class:`ItemNotFound`."""
        with self.errors(name):
            found = await self.store.get(self.space, owner, ids, box=name, most_bytes=MOST_READ)
        if None in found.values:
            unknown = [id for id, value in zip(ids, found.values, strict=False) if value is None]
            shown = ", ".join(repr(id[:128]) for id in unknown[:SHOWN_IDS])
            more = f" and {len(unknown) - SHOWN_IDS} more" if len(unknown) > SHOWN_IDS else ""
            raise ItemNotFound(f"The catalogue {name!r} has no items {shown}{more}.", param=f"ids[{found.values.index(None)}]")
        records = [value for value in found.values if value is not None]
        if sum(map(len, records)) > MOST_READ:
            message = f"The items have more than {MOST_READ} bytes together; name fewer of them in a request."
            raise InvalidRequest(message, param="ids")
        return _spec_decoder.decode(found.head), records

    @contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Convert errors of the store. Raises :class:`CatalogueNotFound` for a name that no catalogue can have."""
        try:
            if not NAME.fullmatch(name):
                raise Missing
            yield
        except Missing:
            raise CatalogueNotFound(f"The catalogue {name[:64]!r} does not exist.", param="catalogue") from None
        except Unavailable:
            message = "Catalogues cannot be read or changed at present; try again, or send the items with the request."
            raise StoreUnavailable(message, retry_after=1) from None
        except Full as full:
            whose = "the catalogues of one group of keys" if full.owner else "all catalogues of the server"
            reason = "Redis has no memory left" if full.most is None else f"{whose} may take {full.most} bytes"
            stored = f" {full.stored} items of this request are registered." if full.stored else ""
            raise StoreFull(f"There is no room: {reason}.{stored} Delete items or catalogues.") from None


def owner_of(connection: ASGIConnection) -> str:  # type: ignore[type-arg]
    """Return the owner of a client's catalogues: its trust group."""
    key = RequestContext.of(connection).key
    return "" if key is None else key.cache_salt


def check_may_write(connection: ASGIConnection) -> None:  # type: ignore[type-arg]
    """Raise :class:`NotPermitted` if the key must not change catalogues."""
    key = RequestContext.of(connection).key
    if key is not None and key.catalogues != "write":
        raise NotPermitted('This API key may not change catalogues; use one whose `catalogues` is "write".')


def check_text(name: str, spec: Spec, model: ServedModel) -> None:
    """Raise :class:`Conflict` if the items of a catalogue with ``spec`` were made for another tokeniser than that of ``model``."""
    if spec.text != model.base.text:
        message = f"The tokeniser of {spec.model!r} has changed since the catalogue {name!r} was made; delete and load it again."
        raise Conflict(message, param="catalogue")
