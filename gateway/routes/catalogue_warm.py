"""``POST /v1/catalogues/{name}/warm``: computes the keys and values of items, so that engines have them before they are scored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody

from engine import wire
from gateway.auth.tenancy import caller_of
from gateway.cache.policy import CachePolicy
from gateway.catalogues.catalogues import check_may_write, owner_of
from gateway.catalogues.record import tokens_of
from gateway.context import RequestContext
from gateway.errors import InvalidRequest
from gateway.handling.body import Body, post_json
from gateway.handling.catalogue_prompts import CataloguePrompts, Whole
from gateway.handling.catalogue_scan import check_whole
from gateway.handling.large import JsonResponse
from gateway.handling.reader import Reader, Reading
from gateway.handling.scoring import Scoring
from gateway.handling.streams import DONE, sse, while_connected
from gateway.keys import PRIORITY_RANGE
from gateway.pool.fanout import FanOut
from gateway.pool.prompts import Prompts, any_readout
from gateway.schemas.catalogue import WarmProgress, WarmRequest
from gateway.text.prepared import Prepared

PART_TOKENS = 1 << 16
"""Tokens that are computed at a time. Live requests of the same key run before what waits in the engines' queues, because warm-ups
have the last priority; those of other keys run beside it, as their weights say."""
_QUERY = [0]
"""Stands for the query; any token."""


@dataclass(kw_only=True)
class _Warming:
    """A warm-up in progress."""

    request: Request[Any, Any, Any]
    body: Reading[WarmRequest]
    whole: Whole
    ids: Sequence[str] | None
    items: int = 0
    cached_items: int = 0
    computed_tokens: int = 0
    pinned_items: int = 0

    @property
    def total(self) -> int:
        return self.whole.state.items if self.ids is None else len(self.ids)

    def progress(self, *, done: bool = False) -> WarmProgress:
        return WarmProgress(
            catalogue=self.whole.state.name,
            items=self.items,
            total=self.total,
            cached_items=self.cached_items,
            computed_tokens=self.computed_tokens,
            pinned_items=self.pinned_items,
            done=done,
        )


def warm_route(reader: Reader, prompts: CataloguePrompts, scoring: Scoring, fan_out: FanOut) -> HTTPRouteHandler:
    """Create the route."""
    warmer = _Warmer(prompts, scoring, fan_out)

    @post_json("/v1/catalogues/{name:str}/warm", WarmRequest, "catalogues")
    async def warm(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[WarmRequest]]
    ) -> Response[WarmProgress]:
        """Compute the keys and values of a catalogue's items, with the last priority. It ends when the client leaves.

        It costs tokens and items like a score. Engines evict items that are not used for long, so a catalogue that does not fit
        stays warm in part.
        """
        if not CachePolicy.of(request).write:
            raise InvalidRequest("A warm-up contradicts `Cache-Control: no-store`; send one of them.")
        async with reader.open(request, WarmRequest, data) as body:
            check_whole(data, top_n=None, stream=True)
            warming = _Warming(request=request, body=body, whole=await prompts.open(request, name, None), ids=body.fields.ids)
            if body.fields.pin_seconds is not None:
                check_may_write(request)
        if body.fields.stream:
            return scoring.streams.response(warmer.events(warming), request)
        async with while_connected(request.scope), aclosing(warmer.parts(warming)) as parts:
            async for _ in parts:
                pass
        return JsonResponse(warming.progress(done=True))

    return warm


@dataclass(frozen=True)
class _Warmer:
    prompts: CataloguePrompts
    scoring: Scoring
    fan_out: FanOut

    async def events(self, warming: _Warming) -> AsyncGenerator[bytes, None]:
        """Yield the progress as server-sent events."""
        async with aclosing(self.parts(warming)) as parts:
            async for _ in parts:
                yield sse(warming.progress())
        yield sse(warming.progress(done=True))
        yield DONE

    async def parts(self, warming: _Warming) -> AsyncGenerator[None, None]:
        """Warm part by part. Raises :class:`GatewayError`."""
        whole, request = warming.whole, warming.request
        account, key = RequestContext.of(request).account, RequestContext.of(request).key
        last = PRIORITY_RANGE[1] if key is None else key.priority_max
        lease = await self.scoring.quotas.charge(request, tokens=whole.state.tokens, items=warming.total)
        async with aclosing(self._pages(warming)) as pages:
            async for records in pages:
                prepared = await self.prompts.rows(warming.body, whole.model, whole.state.spec, records, "ids", reads_labels=False)
                pin = warming.body.fields.pin_seconds
                readout = any_readout(whole.model.info)
                asked = Prompts((), prepared.rows, readout, last, caller_of(request), _QUERY, pin, may_hedge=False)

                def take(places: list[int], scored: wire.Scored) -> None:
                    warming.items += len(places)
                    warming.cached_items += scored.cached_items
                    warming.computed_tokens += scored.computed_tokens
                    warming.pinned_items += scored.pinned_items
                    self.scoring.telemetry.catalogues.items_warmed(scored.cached_items, len(places) - scored.cached_items)

                await self.fan_out.run(whole.model, asked, prepared.rows, take, lease)
                account.items = warming.items
                account.prompt_tokens += _tokens(prepared)
                yield
        if warming.ids is None:
            with self.prompts.catalogues.errors(whole.state.name):
                await self.prompts.catalogues.store.warmed(
                    owner_of(request), whole.state.name, whole.state.epoch, whole.state.version
                )

    async def _pages(self, warming: _Warming) -> AsyncGenerator[list[bytes], None]:
        """Yield records of at most :data:`PART_TOKENS`, or of one item."""
        if warming.ids is not None:
            found = await self.prompts.catalogues.find(warming.whole.owner, warming.whole.state.name, warming.ids)
            for part in _parts([record for record in found.records if record is not None]):
                yield part
            return
        async with aclosing(self.prompts.pages(warming.whole)) as pages:
            async for page in pages:
                for part in _parts([record for _, record in page]):
                    yield part


def _parts(records: list[bytes]) -> list[list[bytes]]:
    parts: list[list[bytes]] = []
    tokens = 0
    for record in records:
        if not parts or tokens + tokens_of(record) > PART_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(record)
        tokens += tokens_of(record)
    return parts


def _tokens(prepared: Prepared) -> int:
    return sum(map(len, prepared.rows))
