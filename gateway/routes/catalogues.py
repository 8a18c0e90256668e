"""``/v1/catalogues``: create, describe, list and delete catalogues; register, list and remove items."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.admission.quotas import Quotas
from gateway.catalogues.catalogues import Catalogues, check_may_write, check_name, check_text, owner_of, version_of
from gateway.catalogues.record import digest_of, expiry_of, tokens_of
from gateway.catalogues.store import Missing, Spec, State
from gateway.errors import Conflict, InvalidRequest
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
    WarmUpBody,
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


@dataclass(frozen=True)
class _Parts:
    pool: Pool
    reader: Reader
    catalogues: Catalogues
    quotas: Quotas
    clock: Callable[[], float] = time.time


def catalogue_routes(pool: Pool, reader: Reader, catalogues: Catalogues, quotas: Quotas) -> list[HTTPRouteHandler]:
    """Create the routes."""
    parts = _Parts(pool, reader, catalogues, quotas)
    return [_create_route(parts), _register_route(parts), *_read_routes(parts), *_delete_routes(parts)]


def _create_route(parts: _Parts) -> HTTPRouteHandler:
    @put_json(f"{PATH}/{{name:str}}", CatalogueRequest, "catalogues")
    async def create(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[CatalogueRequest]]
    ) -> Response[CatalogueBody]:
        """Create a catalogue of items that requests score by their ids. Repeating the request changes nothing."""
        check_may_write(request)
        check_name(name)
        async with parts.reader.open(request, CatalogueRequest, data) as body:
            fields = body.fields
            model = requested_model(request, parts.pool, fields.model)
            preset = fitted_of(request, model, "rerank").preset if fields.preset else None
            prepared = await body.read(model)
        spec = Spec(
            model=fields.model or _only_model(request) or model.name,
            text=model.base.text,
            template=requested_template(fields, preset),
            labels=(fields.labels or []) if preset is None else preset.flat_labels,
            label_ids=prepared.labels,
            ttl_seconds=fields.ttl_seconds,
            preset="" if preset is None else preset.name,
        )
        await parts.quotas.charge(request, tokens=0)
        owner, store = owner_of(request), parts.catalogues.store
        with parts.catalogues.errors(name):
            names = await store.names(owner)
            if name not in names and len(names) >= MOST_CATALOGUES:
                message = f"There are {len(names)} catalogues already, the most that a group of keys may have; delete one."
                raise InvalidRequest(message, param="name")
            state = await store.create(owner, name, spec)
        if state.spec != spec:
            message = f"The catalogue {name!r} exists with another model, template, labels or time to live; delete it first."
            raise Conflict(message, param="name")
        return JsonResponse(_described(state))

    return create


def _register_route(parts: _Parts) -> HTTPRouteHandler:
    @put_json(f"{PATH}/{{name:str}}/items", ItemsRequest, "catalogues")
    async def register(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[ItemsRequest]]
    ) -> Response[RegisteredItems]:
        """Add or replace up to 2,000 items: a JSON array, or JSON lines. The answer comes when every gateway sees them.

        If there is no room for all of them, the first ones are registered.
        """
        check_may_write(request)
        owner, store = owner_of(request), parts.catalogues.store
        with parts.catalogues.errors(name):
            known = await store.find(owner, name, [])
        model = requested_model(request, parts.pool, known.spec.model)
        check_text(name, known.spec, model)
        async with parts.reader.open(request, ItemsRequest, data) as body:
            prepared = await body.read(model, msgspec.msgpack.encode(Opened(known.spec.template)))
        records = _records.decode(prepared.response)
        account = RequestContext.of(request).account
        account.prompt_tokens, account.items = records.tokens, len(records.items)
        await parts.quotas.charge(request, tokens=records.tokens)
        ttl = known.spec.ttl_seconds
        expires = 0 if ttl is None else int((parts.clock() + ttl) * 1000)
        with parts.catalogues.errors(name):
            written = await store.put(owner, name, known.epoch, records.items, expires)
        parts.catalogues.telemetry.catalogues.items_registered(written.added, written.changed, written.unchanged)
        return JsonResponse(
            RegisteredItems(
                catalogue=name,
                added=written.added,
                changed=written.changed,
                unchanged=written.unchanged,
                version=version_of(known.epoch, written.version),
                usage=Usage(records.tokens, records.tokens),
            )
        )

    return register


def _read_routes(parts: _Parts) -> list[HTTPRouteHandler]:
    catalogues, quotas = parts.catalogues, parts.quotas

    @get(PATH, responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def list_all(request: Request[Any, Any, Any]) -> CatalogueList:
        """List the catalogues of the key's trust group. It does not count towards the key's limits."""
        owner = owner_of(request)
        found = []
        with catalogues.errors("all"):
            for name in await catalogues.store.names(owner):
                with suppress(Missing):  # it was deleted meanwhile
                    found.append(_described(await catalogues.store.state(owner, name)))
        return CatalogueList(data=found)

    @get(f"{PATH}/{{name:str}}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def describe(request: Request[Any, Any, Any], name: FromPath[str]) -> CatalogueBody:
        """Describe a catalogue: its form, and how much it holds. It does not count towards the key's limits."""
        with catalogues.errors(name):
            return _described(await catalogues.store.state(owner_of(request), name))

    @get(f"{PATH}/{{name:str}}/items", responses=READ_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def list_items(
        request: Request[Any, Any, Any],
        name: FromPath[str],
        limit: FromQuery[str] = str(PAGE_ITEMS),
        after: FromQuery[str] = "0",
    ) -> ItemPage:
        """List items in the order of their last change: at most `limit` (1 to 1000), behind `after`, the page before's `next`. A
        page may have fewer although more follow; `next` tells."""
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST_PAGE_ITEMS):
            raise InvalidRequest(f"`limit` is a number from 1 to {MOST_PAGE_ITEMS}.", param="limit")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            raise InvalidRequest("`after` is `next` of another page.", param="after")
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            found = await catalogues.store.page(owner_of(request), name, int(after), int(limit))
        return ItemPage(data=[_item(*item) for item in found.items], next=None if found.next is None else str(found.next))

    return [list_all, describe, list_items]


def _delete_routes(parts: _Parts) -> list[HTTPRouteHandler]:
    catalogues, quotas = parts.catalogues, parts.quotas

    @delete(f"{PATH}/{{name:str}}", status_code=200, responses=WRITE_ERRORS, operation_class=ApiOperation, tags=["catalogues"])
    async def remove(request: Request[Any, Any, Any], name: FromPath[str]) -> DeletedCatalogue:
        """Delete a catalogue and its items."""
        check_may_write(request)
        await quotas.charge(request, tokens=0)
        with catalogues.errors(name):
            await catalogues.store.delete(owner_of(request), name)
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
            deleted = await catalogues.store.remove(owner_of(request), name, id)
        return DeletedItems(catalogue=name, deleted=deleted)

    return [remove, remove_items]


def _only_model(request: Request[Any, Any, Any]) -> str | None:
    """Return the name of the only model that the key may use, which may be an alias."""
    key = RequestContext.of(request).key
    return key.models[0] if key is not None and key.models else None


def _described(state: State) -> CatalogueBody:
    return CatalogueBody(
        id=state.name,
        model=state.spec.model,
        preset=state.spec.preset or None,
        template=list(state.spec.template.pieces),
        add_special_tokens=state.spec.template.add_special_tokens,
        labels=state.spec.labels,
        ttl_seconds=state.spec.ttl_seconds,
        items=state.items,
        tokens=state.tokens,
        bytes=state.bytes,
        version=version_of(state.epoch, state.version),
        warmed_version=None if state.warmed is None else version_of(state.epoch, state.warmed),
        warm_up=None if state.warm_up is None else WarmUpBody(**msgspec.structs.asdict(state.warm_up)),
    )


def _item(id: str, record: bytes) -> ItemBody:
    expires = expiry_of(record)
    return ItemBody(id=id, version=digest_of(record).hex(), tokens=tokens_of(record), expires=expires // 1000 if expires else None)
