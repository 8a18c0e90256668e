"""``/v1/catalogues``: routes, and the catalogues in the store.

A catalogue is a box of the gateway's store. It belongs to the trust group of an API key. Its model and template never change; its
items do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from litestar import Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from yardstick_llm.gateway.api.access import Quotas, requested_model
from yardstick_llm.gateway.api.answers import JsonResponse
from yardstick_llm.gateway.api.openapi import READ_ERRORS, WRITE_ERRORS, ApiOperation
from yardstick_llm.gateway.api.reader import Reader, put_json
from yardstick_llm.gateway.api.scoring import fitted_of
from yardstick_llm.gateway.errors import (
    CatalogueNotFound,
    Conflict,
    InvalidRequest,
    ItemNotFound,
    NotPermitted,
    StoreFull,
    StoreUnavailable,
)
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.requests.catalogue import (
    MAX_ID,
    CatalogueBody,
    CatalogueList,
    CatalogueRequest,
    DeletedCatalogue,
    DeletedItems,
    ItemBody,
    ItemPage,
    ItemsRequest,
    Opened,
    Records,
    RegisteredItems,
    requested_template,
)
from yardstick_llm.gateway.schemas.common import Usage
from yardstick_llm.gateway.settings import Settings
from yardstick_llm.gateway.store.base import Box, Full, Missing, Space, Store, Unavailable
from yardstick_llm.gateway.text.catalogue import HEADER_BYTES, Template, digest_of, tokens_of
from yardstick_llm.gateway.text.prepared import ID_BYTES

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
        await asyncio.sleep(0)  # the store in memory has answered without a pause, which takes milliseconds for the most items
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


def owner_of(request: AnyRequest) -> str:
    """Return the owner of a client's catalogues: its trust group."""
    key = RequestContext.of(request).key
    return "" if key is None else key.cache_salt


def check_may_write(request: AnyRequest) -> None:
    """Raise :class:`NotPermitted` if the key must not change catalogues."""
    key = RequestContext.of(request).key
    if key is not None and key.catalogues != "write":
        raise NotPermitted('This API key may not change catalogues; use one whose `catalogues` is "write".')


def check_text(name: str, spec: Spec, model: ServedModel) -> None:
    """Raise :class:`Conflict` if the items of a catalogue with ``spec`` were made for another tokeniser than that of ``model``."""
    if spec.text != model.base.text:
        message = f"The tokeniser of {spec.model!r} has changed since the catalogue {name!r} was made; delete and load it again."
        raise Conflict(message, param="catalogue")


PATH = "/v1/catalogues"
MOST_CATALOGUES = 100
"""Most catalogues of one trust group; listing them takes one call of Redis for each."""
PAGE_ITEMS = 100
MOST_PAGE_ITEMS = 1000
MOST_DELETED = 100
"""Most ids of one deletion, which are in the request's path."""

_records = msgspec.msgpack.Decoder(Records)


def catalogue_routes(pool: Pool, reader: Reader, catalogues: Catalogues, quotas: Quotas) -> list[HTTPRouteHandler]:
    """Create the routes."""
    store, space = catalogues.store, catalogues.space

    @put_json(f"{PATH}/{{name:str}}", "catalogues")
    async def create(request: AnyRequest, name: FromPath[str], data: JSONBody[Body[CatalogueRequest]]) -> Response[CatalogueBody]:
        """Create a catalogue of items that requests score by their ids. Repeating the request changes nothing."""
        check_may_write(request)
        if not NAME.fullmatch(name):
            message = "A catalogue's name has 1 to 64 letters, digits, and `._-`; the first is a letter or digit."
            raise InvalidRequest(message, param="name")
        body = await reader.body(request, CatalogueRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        preset = fitted_of(request, model, "rerank").preset if fields.preset else None
        prepared = await body.read(model)
        key = RequestContext.of(request).key
        only = key.models[0] if key is not None and key.models else None  # the only model of the key; it may be an alias
        spec = Spec(
            model=fields.model or only or model.name,
            text=model.base.text,
            template=requested_template(fields, preset),
            labels=(fields.labels or []) if preset is None else preset.flat_labels,
            label_ids=prepared.labels,
            ttl_seconds=fields.ttl_seconds,
            preset="" if preset is None else preset.name,
        )
        await quotas.charge(request, tokens=0)
        owner = owner_of(request)
        with catalogues.errors(name):
            names = await store.boxes(space, owner)
            if name not in names and len(names) >= MOST_CATALOGUES:
                message = f"There are {len(names)} catalogues already, the most that a group of keys may have; delete one."
                raise InvalidRequest(message, param="name")
            await store.create(space, owner, name, msgspec.msgpack.encode(spec), seconds=spec.ttl_seconds or 0)
        state = await catalogues.describe(owner, name)  # if it existed, it may have another spec
        if state.spec != spec:
            message = f"The catalogue {name!r} exists with another model, template, labels or time to live; delete it first."
            raise Conflict(message, param="name")
        return JsonResponse(_described(state))

    @put_json(f"{PATH}/{{name:str}}/items", "catalogues")
    async def register(request: AnyRequest, name: FromPath[str], data: JSONBody[Body[ItemsRequest]]) -> Response[RegisteredItems]:
        """Add or replace up to 2,000 items: a JSON array, or JSON lines. The answer comes when every gateway sees them.

        If there is no room for all of them, the first ones are registered.
        """
        check_may_write(request)
        owner = owner_of(request)
        known = await catalogues.describe(owner, name)
        model = requested_model(request, pool, known.spec.model)
        check_text(name, known.spec, model)
        body = await reader.body(request, ItemsRequest, data)
        prepared = await body.read(model, msgspec.msgpack.encode(Opened(known.spec.template)))
        records = _records.decode(prepared.response)
        account = RequestContext.of(request).account
        account.prompt_tokens, account.items = records.tokens, len(records.items)
        await quotas.charge(request, tokens=records.tokens)
        with catalogues.errors(name):
            written = await store.put(space, owner, records.items, box=name, epoch=known.box.epoch)
        unchanged = len(records.items) - written.added - written.changed
        catalogues.telemetry.catalogues.items_registered(written.added, written.changed, unchanged)
        return JsonResponse(
            RegisteredItems(
                catalogue=name,
                added=written.added,
                changed=written.changed,
                unchanged=unchanged,
                version=State(name, known.spec, known.box._replace(version=written.version)).version,
                usage=Usage(records.tokens, records.tokens),
            )
        )

    @get(PATH, responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def list_all(request: AnyRequest) -> CatalogueList:
        """List the catalogues of the key's trust group. It does not count towards the key's limits."""
        owner, found = owner_of(request), []
        with catalogues.errors("all"):
            names = await store.boxes(space, owner)
        for name in names:
            with suppress(CatalogueNotFound):  # it was deleted meanwhile
                found.append(_described(await catalogues.describe(owner, name)))
        return CatalogueList(data=found)

    @get(f"{PATH}/{{name:str}}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def describe(request: AnyRequest, name: FromPath[str]) -> CatalogueBody:
        """Describe a catalogue: its form, and how much it holds. It does not count towards the key's limits."""
        return _described(await catalogues.describe(owner_of(request), name))

    @get(f"{PATH}/{{name:str}}/items", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def list_items(
        request: AnyRequest, name: FromPath[str], limit: FromQuery[str] = str(PAGE_ITEMS), after: FromQuery[str] = "0"
    ) -> ItemPage:
        """List items in the order of their last change: at most `limit` (1 to 1000), from `next` of the page before, `after`, on. A
        page may have fewer although more follow; `next` tells."""
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST_PAGE_ITEMS):
            raise InvalidRequest(f"`limit` is a number from 1 to {MOST_PAGE_ITEMS}.", param="limit")
        if not (after.isascii() and after.isdigit() and len(after) <= 16):
            raise InvalidRequest("`after` is `next` of another page.", param="after")
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            found = await store.page(space, owner_of(request), int(after), int(limit), box=name)
        items = [ItemBody(id=id, version=digest_of(record).hex(), tokens=tokens_of(record)) for id, record in found.entries]
        return ItemPage(data=items, next=None if found.next is None else str(found.next))

    @delete(f"{PATH}/{{name:str}}", status_code=200, responses=WRITE_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def remove(request: AnyRequest, name: FromPath[str]) -> DeletedCatalogue:
        """Delete a catalogue and its items."""
        check_may_write(request)
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            await store.delete(space, owner_of(request), name)
        return DeletedCatalogue(id=name)

    @delete(
        f"{PATH}/{{name:str}}/items", status_code=200, responses=WRITE_ERRORS, operation_class=ApiOperation, tags=["catalogues"]
    )
    async def remove_items(request: AnyRequest, name: FromPath[str], id: FromQuery[list[str] | None] = None) -> DeletedItems:
        """Delete the items that the parameters `id` name, at least one and at most 100. Ids that the catalogue does not have are no
        error."""
        check_may_write(request)
        if id is None or len(id) > MOST_DELETED or any(len(each) > MAX_ID for each in id):
            raise InvalidRequest(f"Give 1 to {MOST_DELETED} ids of at most {MAX_ID} characters.", param="id")
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            deleted = await store.remove(space, owner_of(request), id, box=name)
        return DeletedItems(catalogue=name, deleted=deleted)

    return [create, register, list_all, describe, list_items, remove, remove_items]


def _described(state: State) -> CatalogueBody:
    return CatalogueBody(
        id=state.name,
        model=state.spec.model,
        preset=state.spec.preset or None,
        template=list(state.spec.template.pieces),
        add_special_tokens=state.spec.template.add_special_tokens,
        labels=state.spec.labels,
        ttl_seconds=state.spec.ttl_seconds,
        items=state.box.entries,
        tokens=state.tokens,
        bytes=state.box.bytes,
        version=state.version,
    )
