"""Catalogues as routes use them: owners, permissions, and errors for clients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from litestar.connection import ASGIConnection

from gateway.catalogues.store import CatalogueStore, Found, Full, Missing, Spec, TooLarge, Unavailable
from gateway.errors import CatalogueNotFound, Conflict, InvalidRequest, ItemNotFound, NotPermitted, StoreFull, StoreUnavailable
from gateway.http.context import RequestContext
from gateway.ops.metrics import Telemetry
from gateway.pool.replica import ServedModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHOWN_IDS = 5
"""Most unknown ids that an error message lists."""


@dataclass(frozen=True)
class Catalogues:
    """The catalogues of all trust groups."""

    store: CatalogueStore
    telemetry: Telemetry

    async def find(self, owner: str, name: str, ids: Sequence[str]) -> Found:
        """Return items. Raises :class:`CatalogueNotFound`, :class:`ItemNotFound`, :class:`StoreUnavailable`."""
        with self.errors(name):
            found = await self.store.find(owner, name, ids)
        if None in found.records:
            unknown = [id for id, record in zip(ids, found.records, strict=True) if record is None]
            shown = ", ".join(repr(id[:128]) for id in unknown[:SHOWN_IDS])
            more = f" and {len(unknown) - SHOWN_IDS} more" if len(unknown) > SHOWN_IDS else ""
            raise ItemNotFound(f"The catalogue {name!r} has no items {shown}{more}.", param=f"ids[{found.records.index(None)}]")
        return found

    @contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Convert errors of the store. Raises :class:`CatalogueNotFound` for a name that no catalogue can have."""
        try:
            if not NAME.fullmatch(name):
                raise Missing
            yield
        except Missing:
            raise _unknown(name) from None
        except Unavailable:
            message = "Catalogues cannot be read or changed at present; try again, or send the items with the request."
            raise StoreUnavailable(message, retry_after=1) from None
        except TooLarge as large:
            message = f"The items have more than {large.most} bytes together; name fewer of them in a request."
            raise InvalidRequest(message, param="ids") from None
        except Full as full:
            whose = "the catalogues of one group of keys" if full.group else "all catalogues of the server"
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


def check_name(name: str) -> None:
    """Raise :class:`InvalidRequest` unless ``name`` can be the name of a new catalogue."""
    if not NAME.fullmatch(name):
        message = "A catalogue's name has 1 to 64 letters, digits, and `._-`; the first is a letter or digit."
        raise InvalidRequest(message, param="name")


def check_text(name: str, spec: Spec, model: ServedModel) -> None:
    """Raise :class:`Conflict` if the items of a catalogue with ``spec`` were made for another tokeniser than that of ``model``."""
    if spec.text != model.base.text:
        message = f"The tokeniser of {spec.model!r} has changed since the catalogue {name!r} was made; delete and load it again."
        raise Conflict(message, param="catalogue")


def version_of(epoch: str, version: int) -> str:
    """Return a catalogue's version as clients see it."""
    return f"{epoch}-{version}"


def _unknown(name: str) -> CatalogueNotFound:
    return CatalogueNotFound(f"The catalogue {name[:64]!r} does not exist.", param="catalogue")
