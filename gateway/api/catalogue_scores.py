"""Scores and ranks of registered items: of some, or of a whole catalogue in parts.

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
from litestar import Response

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import caller_of, priority_of, requested_model
from yardstick_llm.gateway.api.answers import DONE, EventStream, event_with_rows, sse, while_connected, with_rows
from yardstick_llm.gateway.api.catalogues import Catalogues, Spec, State, check_text, owner_of
from yardstick_llm.gateway.api.reader import INLINE_BYTES, Reading
from yardstick_llm.gateway.api.scoring import LabelForm, ScoreAnswer, Scoring, check_score, fitted_of, per_event
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest, CachePolicy, RequestContext
from yardstick_llm.gateway.limits.limiter import Lease
from yardstick_llm.gateway.pool.fanout import Prompts
from yardstick_llm.gateway.pool.placement import cut
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.presets.preset import Fitted, Preset
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.requests.catalogue import Opened
from yardstick_llm.gateway.requests.rerank import RerankChunk, RerankMeta, RerankRequest, RerankResponse, RerankResult, RerankTokens
from yardstick_llm.gateway.requests.score import ScoreChunk, ScoreRequest, ScoreResponse
from yardstick_llm.gateway.schemas.common import MAX_ITEMS, new_id, usage_of_prompts
from yardstick_llm.gateway.scoring.scorer import Row
from yardstick_llm.gateway.text.catalogue import row_of, tail_bytes, tokens_of
from yardstick_llm.gateway.text.prepared import Bounds, Prepared

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

    request: AnyRequest
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

    async def find(self, request: AnyRequest, name: str, ids: Sequence[str], asked: str | None) -> Named:
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
        self, request: AnyRequest, data: Body[Any], body: Reading[ScoreRequest] | Reading[RerankRequest], *, relative: bool
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
        store, space = self.catalogues.store, self.catalogues.space
        query = _Query(scan.body, scan.model, state.spec, self.bounds, reads_labels=scan.fitted is None)
        while left > 0:
            with self.catalogues.errors(state.name):
                page = await store.page(space, owner_of(scan.request), after, PAGE_ITEMS, box=state.name, epoch=state.box.epoch)
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

    async def _score(self, scan: Scan, first: int, ids: list[str], prepared: Prepared) -> list[Result]:
        """Score a part, and count its cost. ``first``: index of its first item. Raises :class:`GatewayError`."""
        raw = scan.relative and len(prepared.labels) > 1
        readout = wire.Labels(prepared.labels, raw=raw) if scan.fitted is None else scan.fitted.readout
        caller = caller_of(scan.request, cache_salt=scan.body.fields.cache_salt)
        prompts = Prompts((), prepared.rows, readout, scan.priority, caller, prepared.suffix)
        scores = await self.scoring.scorer.score(scan.model, prompts, CachePolicy.of(scan.request), scan.lease)
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

    def _model(self, request: AnyRequest, name: str, spec: Spec, asked: str | None) -> ServedModel:
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
        placed = [row_of(record) for record in records]
        rows, behind = [row for row, _ in placed], [tail for _, tail in placed]
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


_BY_LABELS = Preset(name="catalogue", task="rerank")
"""The formula for items of a catalogue: the probability of the first label among all."""


@dataclass(frozen=True)
class _Form:
    """How an endpoint answers."""

    field: str
    """Field of the answer that holds the results."""
    rank: Callable[[Row], float]
    """Returns the rank of an item; the best one has the highest."""
    row: Callable[[Result], object]
    """Returns a result of the answer."""
    chunk: Callable[[list[Result]], msgspec.Struct]
    """Returns an event with some results."""
    closing: Callable[[list[Result]], msgspec.Struct]
    """Returns the answer without results, when the scan has ended. It gets the best ones."""


async def score_catalogue(
    scanner: Scanner, request: AnyRequest, data: Body[ScoreRequest], body: Reading[ScoreRequest]
) -> Response[ScoreAnswer]:
    """Score all items of a catalogue. Raises :class:`GatewayError`."""
    fields, id = body.fields, f"score-{new_id()}"
    scan = await scanner.open(request, data, body, relative=bool(fields.apply_softmax))
    check_score(scan.model, fields)
    labels = LabelForm([], softmax=bool(fields.apply_softmax))

    def closing(best: list[Result]) -> ScoreResponse:
        return ScoreResponse(
            id=id,
            object="scoring",
            created=int(time.time()),
            model=scan.model.name,
            scores=[],
            usage=usage_of_prompts(scan.tokens, scan.cached_tokens),
            ids=[result.id for result in best],
        )

    form = _Form(
        LabelForm.field,
        rank=labels.rank,
        row=lambda result: labels.item(result.index, result.id, result.row).scores,
        chunk=lambda results: ScoreChunk(id=id, data=[labels.item(result.index, result.id, result.row) for result in results]),
        closing=closing,
    )
    return await _answer(scanner, scan, form, stream=bool(fields.stream), top_n=fields.top_n or 0)


async def rerank_catalogue(
    scanner: Scanner, request: AnyRequest, data: Body[RerankRequest], body: Reading[RerankRequest]
) -> Response[RerankResponse]:
    """Rank all items of a catalogue. Raises :class:`GatewayError`."""
    fields, id = body.fields, f"rerank-{new_id()}"
    scan = await scanner.open(request, data, body, relative=True)
    scan.fitted = preset_of(request, scan.model, scan.state.spec)

    def rank(row: Row) -> float:
        return (scan.fitted or by_labels(scan.labels)).score(row, raw=fields.raw)

    def row(result: Result) -> RerankResult:
        return RerankResult(index=result.index, relevance_score=rank(result.row), id=result.id)

    def closing(_: list[Result]) -> RerankResponse:
        return RerankResponse(
            id=id,
            object="rerank",
            created=int(time.time()),
            model=scan.model.name,
            results=[],
            usage=usage_of_prompts(scan.tokens, scan.cached_tokens),
            meta=RerankMeta(tokens=RerankTokens(input_tokens=scan.tokens)),
        )

    form = _Form("results", rank, row, lambda results: RerankChunk(id=id, results=[*map(row, results)]), closing)
    return await _answer(scanner, scan, form, stream=bool(fields.stream), top_n=fields.top_n or 0)


async def _answer(scanner: Scanner, scan: Scan, form: _Form, *, stream: bool, top_n: int) -> Response[Any]:
    """Return the ``top_n`` best items, or with ``stream`` the results as they become known. Raises :class:`GatewayError`."""
    if stream:
        return EventStream(_events(scanner, scan, form, top_n), scan.request, scanner.scoring.keepalive_seconds)
    best = Best(form.rank, top_n)
    async with while_connected(scan.request.scope), aclosing(scanner.parts(scan)) as parts:
        async for part in parts:
            best.add(part)
    headers, kept = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}, best.results
    return await with_rows(form.closing(kept), form.field, map(form.row, kept), numbers=4 * len(kept), headers=headers)


async def _events(scanner: Scanner, scan: Scan, form: _Form, top_n: int) -> AsyncGenerator[bytes, None]:
    """Yield results, those that may be among the best if there is a ``top_n``, and the best at the end."""
    best, time_slice = Best(form.rank, top_n), TimeSlice()
    async with aclosing(scanner.parts(scan)) as parts:
        async for part in parts:
            for few in cut(best.add(part) if top_n else part, per_event([result.row for result in part])):
                yield sse(form.chunk(few))
                if time_slice.over:
                    await time_slice.yield_to_loop()
    kept = best.results
    yield await event_with_rows(form.closing(kept), form.field, map(form.row, kept))
    yield DONE


def preset_of(request: AnyRequest, model: ServedModel, spec: Spec) -> Fitted | None:
    """Return the preset that a catalogue was created with; None for one with its own template. It is still that of the base model,
    as :func:`check_text` makes sure. Raises :class:`InvalidRequest` for an adapter with another one."""
    if not spec.preset:
        return None
    fitted = fitted_of(request, model, "rerank")
    if fitted.preset.name != spec.preset:
        message = f"The catalogue has prompts of the preset {spec.preset!r}; {model.name!r} needs those of {fitted.preset.name!r}."
        raise InvalidRequest(message, param="model")
    return fitted


def by_labels(labels: list[int]) -> Fitted:
    """Return the formula for a catalogue without a preset."""
    return Fitted(_BY_LABELS, [[label] for label in labels])
