"""``POST /v1/catalogues/{name}/warm``: computes the keys and values of items, so that engines have them before they are scored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Literal

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody

from engine import wire
from gateway.auth.tenancy import caller_of
from gateway.cache.policy import CachePolicy
from gateway.catalogues.catalogues import check_may_write
from gateway.catalogues.record import tokens_of
from gateway.catalogues.store import Full, Missing, Unavailable, WarmUp
from gateway.context import RequestContext
from gateway.errors import InvalidRequest
from gateway.handling.body import Body, post_json
from gateway.handling.catalogue_prompts import CataloguePrompts, Query, Whole
from gateway.handling.catalogue_scan import check_whole
from gateway.handling.large import JsonResponse
from gateway.handling.overlapped import overlapped
from gateway.handling.reader import Reader, Reading
from gateway.handling.retry_deadline import RetryDeadline
from gateway.handling.scoring import Scoring
from gateway.handling.streams import DONE, sse, while_connected
from gateway.keys import PRIORITY_RANGE
from gateway.limits.base import Lease
from gateway.pool.fanout import FanOut, Prompts, any_readout
from gateway.schemas.catalogue import WarmProgress, WarmRequest
from gateway.text.prepared import Prepared

PART_TOKENS = 1 << 16
"""Most tokens of a part, which all engines share as placement says."""
PARTS = 2
"""Parts that are computed at one time, so that an engine which ends its share of a part early begins with the next one. Live
requests of the same key run before what waits in the engines' queues, because warm-ups have the last priority; those of other keys
run beside it, as their weights say."""
_QUERY = [0]
"""Stands for the query; any token."""


REPORT_SECONDS = 1.0
"""Pause between two reports of the progress to the store of catalogues."""


@dataclass(kw_only=True)
class _Warming:
    """A warm-up in progress."""

    request: Request[Any, Any, Any]
    fields: WarmRequest
    query: Reading[WarmRequest]
    """Reads the tokens behind items. It holds no worker, because a warm-up reads them for each part, and takes long."""
    whole: Whole
    own_model: bool
    """Whether items are warmed for the catalogue's model, and not for another adapter."""
    items: int = 0
    cached_items: int = 0
    computed_tokens: int = 0
    pinned_items: int = 0
    reported: float = 0.0
    """Time of the last report."""

    @property
    def ids(self) -> Sequence[str] | None:
        return self.fields.ids

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

    def report(self, state: Literal["running", "done", "stopped"]) -> WarmUp:
        return WarmUp(
            model=self.whole.model.name,
            state=state,
            items=self.items,
            total=self.total,
            cached_items=self.cached_items,
            computed_tokens=self.computed_tokens,
            pinned_items=self.pinned_items,
            updated=int(time.time()),
        )


def warm_route(
    reader: Reader, prompts: CataloguePrompts, scoring: Scoring, fan_out: FanOut, retries: RetryDeadline
) -> HTTPRouteHandler:
    """Create the route."""
    warmer = _Warmer(prompts, scoring, fan_out, retries)

    @post_json("/v1/catalogues/{name:str}/warm", WarmRequest, "catalogues")
    async def warm(
        request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[Body[WarmRequest]]
    ) -> Response[WarmProgress]:
        """Compute the keys and values of a catalogue's items, with the last priority. It ends when the client leaves.

        It costs tokens and items like a score. While engines are busy or away it waits, up to `scan_wait_seconds` of the server's
        settings. Engines evict items that are not used for long, so a catalogue that does not fit stays warm in part.
        """
        if not CachePolicy.of(request).write:
            raise InvalidRequest("A warm-up contradicts `Cache-Control: no-store`; send one of them.")
        async with reader.open(request, WarmRequest, data) as body:
            fields = body.fields
            if fields.ids is None:
                check_whole(data, top_n=None, stream=True)
            whole = await prompts.open(request, name, fields.model, all_items=fields.ids is None)
            own = fields.model is None or whole.model is prompts.pool.model(whole.state.spec.model)
            query = reader.without_worker(request, WarmRequest())
            warming = _Warming(request=request, fields=fields, query=query, whole=whole, own_model=own)
            if fields.pin_seconds is not None:
                check_may_write(request)
        if fields.stream:
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
    retries: RetryDeadline

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
        account = RequestContext.of(request).account
        query = Query(warming.query, whole.model, whole.state.spec, reads_labels=False, may_be_empty=True)
        named = None if warming.ids is None else await self._named(warming)
        tokens = whole.state.tokens if named is None else sum(map(tokens_of, named))
        lease = await self.scoring.quotas.charge(request, tokens=tokens, items=warming.total)
        done = False
        await self._report(warming, "running")
        try:
            async with aclosing(overlapped(self._begun(warming, query, named, lease), lambda: PARTS)) as parts:
                async for tokens in parts:
                    account.items = warming.items
                    account.prompt_tokens += tokens
                    if lease is not None:
                        lease.used_tokens = account.prompt_tokens
                    yield
                    await self._report(warming, "running")
            done = True
        finally:
            await self._report(warming, "done" if done else "stopped")

    async def _begun(
        self, warming: _Warming, query: Query, named: list[bytes] | None, lease: Lease | None
    ) -> AsyncGenerator[Coroutine[Any, Any, int], None]:
        """Yield coroutines that warm a part each."""
        async with aclosing(self._pages(warming, query, named)) as pages:
            async for records in pages:
                yield self._warm(warming, await self.prompts.rows(query, records, "ids"), lease)

    async def _warm(self, warming: _Warming, prepared: Prepared, lease: Lease | None) -> int:
        """Have engines compute a part, and return its tokens. Raises :class:`GatewayError`."""
        whole, request, pin = warming.whole, warming.request, warming.fields.pin_seconds
        key = RequestContext.of(request).key
        last = PRIORITY_RANGE[1] if key is None else key.priority_max
        readout = any_readout(whole.model.info)
        asked = Prompts((), prepared.rows, readout, last, caller_of(request), _QUERY, pin, may_hedge=False)
        left = dict.fromkeys(range(len(prepared.rows)))

        async def compute() -> None:
            """Compute what is left; an attempt before may have computed some."""
            places = list(left)

            def take(answered: list[int], scored: wire.Scored) -> None:
                for place in answered:
                    del left[places[place]]
                warming.items += len(answered)
                warming.cached_items += scored.cached_items
                warming.computed_tokens += scored.computed_tokens
                warming.pinned_items += scored.pinned_items
                self.scoring.telemetry.catalogues.items_warmed(scored.cached_items, len(answered) - scored.cached_items)

            await self.fan_out.run(whole.model, asked, [prepared.rows[place] for place in places], take, lease)

        await self.retries.score(compute, whole.model.name)
        return sum(map(len, prepared.rows))

    async def _report(self, warming: _Warming, state: Literal["running", "done", "stopped"]) -> None:
        """Tell the store how far the warm-up has come, if it is time or the end. A store that is away or full ends no warm-up."""
        now = time.monotonic()
        if state == "running" and now < warming.reported + REPORT_SECONDS:
            return
        warming.reported = now
        whole = warming.whole
        complete = state == "done" and warming.ids is None and warming.own_model
        warmed = whole.state.version if complete else None
        with suppress(Missing, Unavailable, Full):
            await self.prompts.catalogues.store.note_warm_up(
                whole.owner, whole.state.name, whole.state.epoch, warming.report(state), warmed
            )

    async def _named(self, warming: _Warming) -> list[bytes]:
        """Return the records of the items that the request names. Raises :class:`GatewayError`."""
        found = await self.prompts.catalogues.find(warming.whole.owner, warming.whole.state.name, warming.ids or ())
        return [record for record in found.records if record is not None]

    async def _pages(self, warming: _Warming, query: Query, named: list[bytes] | None) -> AsyncGenerator[list[bytes], None]:
        """Yield records of at most :data:`PART_TOKENS`, or of one item. ``named``: the items of the request; None for all."""
        if named is not None:
            for part in _parts(named):
                yield part
            return
        async with aclosing(self.prompts.pages(warming.whole, query)) as pages:
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
