"""Scores registered items: those that a request names, or a whole catalogue, part by part.

Prompts are built of stored token ids and the query; only the query is tokenised. A whole catalogue is scored in parts, so that its
items are in memory for a moment only and other requests run in between. A few parts are computed at one time: placement divides
each of them among the engines, and while an engine waits for the others to end a part, it computes its share of the next ones.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from litestar import Request

from engine import wire
from gateway.cache.base import Row
from gateway.cache.policy import CachePolicy
from gateway.catalogues.catalogues import Catalogues, Spec, State, check_text, owner_of
from gateway.catalogues.record import row_of, tail_bytes, tokens_of
from gateway.errors import EngineLost, EngineSilent, GatewayError, InvalidRequest, NotReady, Overloaded, StoreUnavailable
from gateway.handling.access import caller_of, priority_of, requested_model
from gateway.handling.body import Body
from gateway.handling.reader import INLINE_BYTES, Reading
from gateway.handling.scoring import Scoring
from gateway.handling.streams import while_connected
from gateway.http.context import RequestContext
from gateway.limits.base import Lease
from gateway.pool.fanout import Prompts
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted
from gateway.reading.catalogue import Opened
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.score import ScoreRequest
from gateway.schemas.truncation import MAX_ITEMS
from gateway.scoring.scorer import Scores
from gateway.text.bounds import Bounds
from gateway.text.prepared import Prepared

MOST_ITEMS = 200_000
"""Most items of a request for a whole catalogue."""
PAGE_ITEMS = 500
"""Items that are read from the store at a time."""
PART_ITEMS, PART_TOKENS = 250, 1 << 16
"""Most items of a part of a whole catalogue, and most tokens, unless one item has more."""
PARTS_PER_ENGINE, MOST_PARTS = 2, 32
"""Parts of one request that are computed at one time, for each engine, and most of them. A request of the same key waits behind
them."""
SLACK = 1000
"""Results that are kept besides the best ones: an item that is scored again may leave its place to one of them."""
WAIT_SECONDS = 60.0
"""Longest time that a request which has results already waits for engines that are away, full or lost, or for its store."""
RETRY_SECONDS = 0.25
"""Pause before a part is sent again. :class:`gateway.pool.dispatch.Dispatcher` waits for a ready engine by itself, but refuses at
once when too many requests wait."""
MOST_LOSSES = 3
"""Times that engines may be lost while they compute one part: the part may be the reason."""
_AWAY = NotReady, Overloaded
_LOST = EngineLost, EngineSilent


class Named(NamedTuple):
    """Items that a request names, at one moment, and the model that scores them."""

    model: ServedModel
    spec: Spec
    ids: Sequence[str]
    records: list[bytes]


@dataclass(frozen=True)
class Result:
    """One item of a catalogue, scored."""

    index: int
    """Place of the item in the order of scoring."""
    id: str
    row: Row


@dataclass(kw_only=True)
class Scan:
    """A request for all items of a catalogue, and what it has cost so far."""

    request: Request[Any, Any, Any]
    body: Reading[Any]
    state: State
    model: ServedModel
    fitted: Fitted | None = None
    """The preset whose formula ranks the items; None reads the labels of the request or of the catalogue."""
    relative: bool
    """Whether labels are compared with each other only, so that logits serve as log-probabilities do."""
    priority: int
    size: int
    """Bytes of the request's body, which are not less than the query's characters."""
    lease: Lease | None = None
    charged: bool = False
    items: int = 0
    hits: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    labels: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Scanner:
    """Scores registered items."""

    catalogues: Catalogues
    pool: Pool
    bounds: Bounds
    scoring: Scoring

    async def find(self, request: Request[Any, Any, Any], name: str, ids: Sequence[str], asked: str | None) -> Named:
        """Return items. ``asked``: the request's ``model``. Raises :class:`GatewayError`."""
        spec, records = await self.catalogues.find(owner_of(request), name, ids)
        return Named(self._model(request, name, spec, asked), spec, ids, records)

    async def read(self, body: Reading[Any], items: Named, *, reads_labels: bool = True) -> Prepared:
        """Return the prompts of ``items`` with the query in ``body``. Raises :class:`GatewayError`."""
        query = _Query(body, items.model, items.spec, self.bounds, reads_labels=reads_labels)
        prepared = await query.prompts(items.records, "ids[]")
        prepared.ids = items.ids
        return prepared

    async def open(
        self,
        request: Request[Any, Any, Any],
        data: Body[Any],
        body: Reading[ScoreRequest] | Reading[RerankRequest],
        *,
        relative: bool,
    ) -> Scan:
        """Begin a request for a whole catalogue. Raises :class:`GatewayError` for one that cannot be answered within bounds."""
        fields, size = body.fields, len(data.content)
        if not fields.stream and not fields.top_n:
            raise InvalidRequest("A request for a whole catalogue needs `top_n` or `stream`; or name items in `ids`.", param="ids")
        if (fields.top_n or 0) > MAX_ITEMS:
            raise InvalidRequest(f"`top_n` of a catalogue is at most {MAX_ITEMS}.", param="top_n")
        if size > INLINE_BYTES:  # the query is read for each part, without a worker of its own
            message = f"A request for a whole catalogue has at most {INLINE_BYTES} bytes; shorten the query."
            raise InvalidRequest(message, param="query")
        state = await self.catalogues.describe(owner_of(request), fields.catalogue or "")
        model = self._model(request, state.name, state.spec, fields.model)
        if state.box.entries > MOST_ITEMS:
            message = f"The catalogue has {state.box.entries} items; a request may score {MOST_ITEMS}. Name some of them in `ids`."
            raise InvalidRequest(message, param="ids")
        priority = priority_of(request, fields.priority)
        return Scan(request=request, body=body, state=state, model=model, relative=relative, priority=priority, size=size)

    async def best(self, scan: Scan, rank: Callable[[Row], float], most: int) -> list[Result]:
        """Return the ``most`` items with the highest ranks, the highest first. Raises :class:`GatewayError`."""
        best = Best(rank, most)
        async with while_connected(scan.request.scope), aclosing(self.parts(scan)) as parts:
            async for part in parts:
                best.add(part)
        return best.results

    async def parts(self, scan: Scan) -> AsyncGenerator[list[Result], None]:
        """Yield the results of all items, part by part, in the order of the catalogue. Raises :class:`GatewayError`; results of the
        parts before a failure come first."""
        begun: deque[asyncio.Task[list[Result]]] = deque()
        items = 0
        try:
            async with aclosing(self._prepared(scan)) as prepared:
                async for ids, prompts in prepared:
                    begun.append(asyncio.create_task(self._score(scan, items, ids, prompts)))
                    items += len(ids)
                    most = min(MOST_PARTS, PARTS_PER_ENGINE * max(1, len(scan.model.ready)))
                    while begun and (begun[0].done() or len(begun) >= most):
                        yield await begun.popleft()
            while begun:
                yield await begun.popleft()
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
        if not scan.charged:
            await self.scoring.quotas.charge(scan.request, tokens=0)
        self.scoring.telemetry.scored(RequestContext.of(scan.request).account)

    async def _prepared(self, scan: Scan) -> AsyncGenerator[tuple[list[str], Prepared], None]:
        """Yield ids and prompts of parts that are within the bounds of a request. The first one charges the request.

        Items that change meanwhile move to the end and may come again, but not for ever: besides as many items as there were at the
        beginning, there come as many as a request may have.
        """
        state, after, left = scan.state, 0, scan.state.box.entries + MOST_ITEMS
        query = _Query(scan.body, scan.model, state.spec, self.bounds, reads_labels=scan.fitted is None)
        while left > 0:
            page = await self._page(scan, after)
            for part in await query.divided(page.entries[:left], scan.size) if page.entries else ():
                prepared = await query.prompts([record for _, record in part], "ids")
                scan.labels = prepared.labels
                if not scan.charged:
                    scan.charged = True
                    behind = len(prepared.rows[0]) - tokens_of(part[0][1]) + len(prepared.suffix)
                    expected = state.tokens + behind * state.box.entries
                    scan.lease = await self.scoring.quotas.charge(scan.request, tokens=expected, items=state.box.entries)
                yield [id for id, _ in part], prepared
            left -= len(page.entries)
            if page.next is None:
                return
            after = page.next

    async def _page(self, scan: Scan, after: int) -> Any:
        """Return some items. A later page than the first is asked for again while the store is away."""
        store, space, until = self.catalogues.store, self.catalogues.space, time.monotonic() + WAIT_SECONDS
        while True:
            try:
                with self.catalogues.errors(scan.state.name):
                    owner, epoch = owner_of(scan.request), scan.state.box.epoch
                    return await store.page(space, owner, after, PAGE_ITEMS, box=scan.state.name, epoch=epoch)
            except StoreUnavailable:
                if not after or time.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _score(self, scan: Scan, first: int, ids: list[str], prepared: Prepared) -> list[Result]:
        """Score a part, and count its cost. ``first``: index of its first item. Raises :class:`GatewayError`."""
        raw = scan.relative and len(prepared.labels) > 1
        readout = wire.Labels(prepared.labels, raw=raw) if scan.fitted is None else scan.fitted.readout
        caller = caller_of(scan.request, cache_salt=scan.body.fields.cache_salt)
        prompts = Prompts((), prepared.rows, readout, scan.priority, caller, prepared.suffix)
        scores = await self._scores(scan, prompts, retries=first > 0)
        account = RequestContext.of(scan.request).account
        scan.items += len(ids)
        scan.hits += scores.hits
        scan.tokens += prepared.tokens
        scan.cached_tokens += scores.cached_tokens
        account.prompt_tokens, account.items = scan.tokens, scan.items
        account.cache_hits, account.cached_tokens = scan.hits, scan.cached_tokens
        account.queue_seconds = max(account.queue_seconds, scores.queue_seconds)
        self.scoring.telemetry.catalogues.scored(account.model, prepared.tokens, scores.cached_tokens)
        if scan.lease is not None:
            scan.lease.used_tokens = scan.tokens
        return [Result(first + place, id, row) for place, (id, row) in enumerate(zip(ids, scores.rows, strict=True))]

    async def _scores(self, scan: Scan, prompts: Prompts, *, retries: bool) -> Scores:
        """Score prompts; with ``retries``, again after engines were away, full or lost, because giving up would lose the results of
        other parts. Raises :class:`GatewayError`."""
        policy, until, losses = CachePolicy.of(scan.request), 0.0, 0
        while True:
            try:
                return await self.scoring.scorer.score(scan.model, prompts, policy, scan.lease)
            except GatewayError as error:
                now = time.monotonic()
                until = until or now + WAIT_SECONDS
                losses += isinstance(error, _LOST)
                if not retries or not isinstance(error, _AWAY + _LOST) or now >= until or losses > MOST_LOSSES:
                    raise
                self.scoring.telemetry.engines.retries.labels(scan.model.name, error.code or error.type).inc()
            await asyncio.sleep(RETRY_SECONDS)

    def _model(self, request: Request[Any, Any, Any], name: str, spec: Spec, asked: str | None) -> ServedModel:
        """Return the model of a catalogue, or the adapter of that model that the client asks for. Raises :class:`GatewayError`,
        also if the client asks for another model."""
        model = requested_model(request, self.pool, spec.model if asked is None else asked)
        if asked is not None and self.pool.model(spec.model).base.name != model.base.name:  # they may be of two versions
            raise InvalidRequest(f"The catalogue {name!r} is for the model {spec.model!r}.", param="model")
        check_text(name, spec, model)
        return model


class _Query:
    """The query of a request, for many items of one catalogue. Where items end alike, it is tokenised once."""

    def __init__(self, body: Reading[Any], model: ServedModel, spec: Spec, bounds: Bounds, *, reads_labels: bool) -> None:
        """``reads_labels``: whether the request needs labels."""
        self._body = body
        self._model = model
        self._spec = spec
        self._bounds = bounds
        self._reads_labels = reads_labels
        self._last: tuple[bytes, Prepared] | None = None
        self._sample: Prepared | None = None

    async def prompts(self, records: Sequence[bytes], param: str) -> Prepared:
        """Return the prompts of the items in ``records``, at least one. Raises :class:`GatewayError`."""
        model, bounds = self._model, self._bounds
        rows, behind = zip(*map(row_of, records), strict=True)
        tails = {tail: place for place, tail in enumerate(dict.fromkeys(behind))}
        bounds.check("max_request_characters", sum(map(len, tails)), "characters that must be tokenised", "ids")
        prepared = await self._behind(list(tails))
        seams = [array("I", seam) for seam in prepared.rows]
        if any(seams):
            for row, tail in zip(rows, behind, strict=True):
                row.extend(seams[tails[tail]])
                row.content += seams[tails[tail]].tobytes()
        lengths, shared = [*map(len, rows)], len(prepared.suffix)
        if max(lengths) + shared > model.context:
            place = lengths.index(max(lengths))
            model.facts.check_prompt(lengths[place] + shared, param.replace("[]", f"[{place}]"))
        if min(lengths) + shared == 0:
            at = param.replace("[]", f"[{lengths.index(0)}]")
            raise InvalidRequest(f"`{at}`: the item and the query are both empty, so there is no position to score at.", param=at)
        labels = prepared.labels or self._spec.label_ids
        if self._reads_labels and not labels:
            raise InvalidRequest("Give `labels` or `label_token_ids`; the catalogue has no labels of its own.", param="labels")
        bounds.check("max_scores", len(rows) * len(labels), "scores (items and labels)", "ids")
        bounds.check("max_request_tokens", sum(lengths) + shared * len(rows), "tokens", "ids")
        return Prepared(rows, (), prepared.suffix, labels, param=param, query_truncated=prepared.query_truncated)

    async def divided(self, page: list[tuple[str, bytes]], query_bytes: int) -> list[list[tuple[str, bytes]]]:
        """Divide items into parts. Half of each bound is left for what is not known before the query is tokenised behind each
        tail."""
        if self._sample is None:
            self._sample = await self._behind([row_of(page[0][1])[1]])
        shared = len(self._sample.suffix) + sum(map(len, self._sample.rows))
        labels = len(self._sample.labels or self._spec.label_ids)
        most_tokens = min(PART_TOKENS, self._bounds.max_request_tokens // 2)
        most_characters = self._bounds.max_request_characters // 2
        most_items = min(PART_ITEMS, max(1, self._bounds.max_scores // max(1, labels)))
        parts: list[list[tuple[str, bytes]]] = []
        tokens = characters = 0
        for id, record in page:
            tail = tail_bytes(record)
            size = tokens_of(record) + tail + shared  # a token of the tail has at least a byte
            text = tail + query_bytes if tail else 0
            full = parts and (len(parts[-1]) == most_items or tokens + size > most_tokens or characters + text > most_characters)
            if not parts or full:
                parts.append([])
                tokens = characters = 0
            parts[-1].append((id, record))
            tokens, characters = tokens + size, characters + text
        return parts

    async def _behind(self, tails: list[bytes]) -> Prepared:
        """Return the tokens behind each of ``tails``, which are distinct, as rows, and those that all prompts end with as suffix.
        Raises :class:`GatewayError`."""
        if self._last is None or [self._last[0]] != tails:
            prepared = await self._body.read(self._model, msgspec.msgpack.encode(Opened(self._spec.template, tails)))
            if len(tails) > 1:
                return prepared
            self._last = tails[0], prepared
        return self._last[1]


class Best:
    """The results with the highest ranks, in bounded memory.

    An item that changes during a scan may come twice, and its later result counts. If that has a lower rank, a result that the
    first one displaced is among the best again; :data:`SLACK` displaced results are kept for this.
    """

    def __init__(self, rank: Callable[[Row], float], most: int) -> None:
        self._rank = rank
        self._most = most
        self._kept: dict[str, tuple[float, int, Result]] = {}
        """By id, the best first."""

    def add(self, part: list[Result]) -> list[Result]:
        """Add results; return those that may be among the best. A later result of an item replaces an earlier one."""
        self._kept |= {result.id: (-self._rank(result.row), result.index, result) for result in part}
        ranked = sorted(self._kept.values(), key=lambda kept: kept[:2])[: self._most + SLACK]
        self._kept = {kept[2].id: kept for kept in ranked}
        best = {kept[1] for kept in ranked[: self._most]}
        return [result for result in part if result.index in best]

    @property
    def results(self) -> list[Result]:
        """The best results, the highest rank first; of equal ones, the one that was scored first."""
        return [result for _, _, result in [*self._kept.values()][: self._most]]
