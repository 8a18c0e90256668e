"""``/v1/catalogues``: create, describe, list and delete catalogues; register, list and remove items."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from litestar import Request, Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.admission.quotas import Quotas
from gateway.catalogues.catalogues import NAME, Catalogues, Spec, State, check_may_write, check_text, owner_of
from gateway.catalogues.record import digest_of, tokens_of
from gateway.errors import CatalogueNotFound, Conflict, InvalidRequest
from gateway.handling.access import requested_model
from gateway.handling.body import Body, put_json
from gateway.handling.large import JsonResponse
from gateway.handling.openapi import READ_ERRORS, WRITE_ERRORS, ApiOperation
from gateway.handling.reader import Reader
from gateway.handling.scoring import fitted_of
from gateway.http.context import RequestContext
from gateway.pool.pool import Pool
from gateway.reading.catalogue import Opened, Records, requested_template
from gateway.schemas.catalogue import (
    MAX_ID,
    CatalogueBody,
    CatalogueList,
    CatalogueRequest,
    DeletedCatalogue,
    DeletedItems,
    ItemBody,
    ItemPage,
    ItemsRequest,
    RegisteredItems,
)
from gateway.schemas.usage import Usage

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

    @put_json(f"{PATH}/{{name:str}}", CatalogueRequest, "catalogues")
    async def create(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[CatalogueRequest]]
    ) -> Response[CatalogueBody]:
        """Create a catalogue of items that requests score by their ids. Repeating the request changes nothing."""
        check_may_write(request)
        if not NAME.fullmatch(name):
            message = "A catalogue's name has 1 to 64 letters, digits, and `._-`; the first is a letter or digit."
            raise InvalidRequest(message, param="name")
        async with reader.open(request, CatalogueRequest, data) as body:
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
        state = await catalogues.create(owner, name, spec)
        if state.spec != spec:
            message = f"The catalogue {name!r} exists with another model, template, labels or time to live; delete it first."
            raise Conflict(message, param="name")
        return JsonResponse(_described(state))

    @put_json(f"{PATH}/{{name:str}}/items", ItemsRequest, "catalogues")
    async def register(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[ItemsRequest]]
    ) -> Response[RegisteredItems]:
        """Add or replace up to 2,000 items: a JSON array, or JSON lines. The answer comes when every gateway sees them.

        If there is no room for all of them, the first ones are registered.
        """
        check_may_write(request)
        owner = owner_of(request)
        known = await catalogues.describe(owner, name)
        model = requested_model(request, pool, known.spec.model)
        check_text(name, known.spec, model)
        async with reader.open(request, ItemsRequest, data) as body:
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
    async def list_all(request: Request[Any, Any, Any]) -> CatalogueList:
        """List the catalogues of the key's trust group. It does not count towards the key's limits."""
        owner, found = owner_of(request), []
        with catalogues.errors("all"):
            names = await store.boxes(space, owner)
        for name in names:
            with suppress(CatalogueNotFound):  # it was deleted meanwhile
                found.append(_described(await catalogues.describe(owner, name)))
        return CatalogueList(data=found)

    @get(f"{PATH}/{{name:str}}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def describe(request: Request[Any, Any, Any], name: FromPath[str]) -> CatalogueBody:
        """Describe a catalogue: its form, and how much it holds. It does not count towards the key's limits."""
        return _described(await catalogues.describe(owner_of(request), name))

    @get(f"{PATH}/{{name:str}}/items", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def list_items(
        request: Request[Any, Any, Any],
        name: FromPath[str],
        limit: FromQuery[str] = str(PAGE_ITEMS),
        after: FromQuery[str] = "0",
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
    async def remove(request: Request[Any, Any, Any], name: FromPath[str]) -> DeletedCatalogue:
        """Delete a catalogue and its items."""
        check_may_write(request)
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            await store.delete(space, owner_of(request), name)
        return DeletedCatalogue(id=name)

    @delete(
        f"{PATH}/{{name:str}}/items", status_code=200, responses=WRITE_ERRORS, operation_class=ApiOperation, tags=["catalogues"]
    )
    async def remove_items(
        request: Request[Any, Any, Any],
        name: FromPath[str],
        id: FromQuery[list[str] | None] = None,
    ) -> DeletedItems:
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
