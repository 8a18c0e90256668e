"""Scores a whole catalogue: part by part, so that its items are in memory for a moment only and other requests run in between.

A few parts are computed at one time. Placement divides each of them among the engines, and while an engine waits for the others to
end a part, it computes its share of the next ones.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from litestar import Request

from engine import wire
from gateway.auth.tenancy import caller_of, priority_of
from gateway.cache.base import Row
from gateway.cache.policy import CachePolicy
from gateway.catalogues.record import tokens_of
from gateway.context import RequestContext
from gateway.errors import InvalidRequest
from gateway.handling.body import Body
from gateway.handling.catalogue_prompts import CataloguePrompts, Query, Whole
from gateway.handling.overlapped import overlapped
from gateway.handling.reader import INLINE_BYTES, Reading
from gateway.handling.retry_deadline import RetryDeadline
from gateway.handling.scoring import Scoring
from gateway.handling.streams import while_connected
from gateway.limits.base import Lease
from gateway.pool.fanout import Prompts
from gateway.presets.fitted import Fitted
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.score import ScoreRequest
from gateway.schemas.truncation import MAX_ITEMS
from gateway.scoring.scorer import Scores
from gateway.text.prepared import Prepared

PARTS_PER_ENGINE, MOST_PARTS = 2, 32
"""Parts of one request that are computed at one time, for each engine, and most of them. A request of the same key waits behind
them."""
SLACK = 1000
"""Results that are kept besides the best ones: an item that is scored again may leave its place to one of them."""


@dataclass(frozen=True)
class Result:
    """One item of a catalogue, scored."""

    index: int
    """Place of the item in the order of scoring."""
    id: str
    row: Row


class _Part(NamedTuple):
    """Some items of a catalogue, scored."""

    ids: list[str]
    tokens: int
    scores: Scores


@dataclass(kw_only=True)
class Scan:
    """A request for all items of a catalogue, and what it has cost so far."""

    request: Request[Any, Any, Any]
    body: Reading[Any]
    whole: Whole
    fitted: Fitted | None = None
    """The preset whose formula ranks the items; None reads the labels of the request or of the catalogue."""
    relative: bool
    """Whether labels are compared with each other only, so that logits serve as log-probabilities do."""
    priority: int
    cache_salt: str | None
    size: int
    """Bytes of the request's body."""
    lease: Lease | None = None
    charged: bool = False
    items: int = 0
    hits: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    labels: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Scanner:
    """Scores whole catalogues."""

    prompts: CataloguePrompts
    scoring: Scoring
    retries: RetryDeadline
    """For parts after the first one; when that fails, nothing is lost."""

    async def open(
        self,
        request: Request[Any, Any, Any],
        data: Body[Any],
        body: Reading[ScoreRequest] | Reading[RerankRequest],
        *,
        relative: bool,
    ) -> Scan:
        """Begin a request for a whole catalogue. Raises :class:`GatewayError` for one that cannot be answered within bounds."""
        fields = body.fields
        check_whole(data, top_n=fields.top_n, stream=bool(fields.stream))
        whole = await self.prompts.open(request, fields.catalogue or "", fields.model)
        priority = priority_of(request, fields.priority)
        return Scan(
            request=request,
            body=body,
            whole=whole,
            relative=relative,
            priority=priority,
            cache_salt=fields.cache_salt,
            size=len(data.content),
        )

    async def best(self, scan: Scan, rank: Callable[[Row], float], most: int) -> list[Result]:
        """Return the ``most`` items with the highest ranks, the highest first. Raises :class:`GatewayError`."""
        best = Best(rank, most)
        async with while_connected(scan.request.scope), aclosing(self.parts(scan)) as parts:
            async for part in parts:
                best.add(part)
        return best.results

    async def parts(self, scan: Scan) -> AsyncGenerator[list[Result], None]:
        """Yield the results of all items, part by part, in the order of the catalogue. Raises :class:`GatewayError`."""
        async with aclosing(overlapped(self._scored(scan), partial(_parts_at_one_time, scan.whole))) as parts:
            async for part in parts:
                yield self._taken(scan, part)
        if not scan.charged:
            await self.scoring.quotas.charge(scan.request, tokens=0)
        self.scoring.telemetry.scored(RequestContext.of(scan.request).account)

    async def _scored(self, scan: Scan) -> AsyncGenerator[Coroutine[Any, Any, _Part], None]:
        """Yield coroutines that score a part each."""
        first = True
        async with aclosing(self._prepared(scan)) as prepared:
            async for ids, prompts in prepared:
                yield self._score(scan, ids, prompts, first=first)
                first = False

    async def _prepared(self, scan: Scan) -> AsyncGenerator[tuple[list[str], Prepared], None]:
        """Yield ids and prompts of each part. The first part charges the request."""
        whole = scan.whole
        query = Query(scan.body, whole.model, whole.state.spec, size=scan.size, reads_labels=scan.fitted is None)
        async with aclosing(self.prompts.pages(whole, query)) as pages:
            async for page in pages:
                prepared = await self.prompts.rows(query, [record for _, record in page], "ids")
                scan.labels = prepared.labels
                if not scan.charged:
                    scan.charged = True
                    expected = _expected(whole, prepared, page[0][1])
                    scan.lease = await self.scoring.quotas.charge(scan.request, tokens=expected, items=whole.state.items)
                yield [id for id, _ in page], prepared

    async def _score(self, scan: Scan, ids: list[str], prepared: Prepared, *, first: bool) -> _Part:
        """Score a part. Raises :class:`GatewayError`; for the first part at once, because no results are lost."""
        caller, policy = caller_of(scan.request, cache_salt=scan.cache_salt), CachePolicy.of(scan.request)
        raw = scan.relative and len(prepared.labels) > 1
        readout = wire.Labels(prepared.labels, raw=raw) if scan.fitted is None else scan.fitted.readout
        branches = Prompts((), prepared.rows, readout, scan.priority, caller, prepared.suffix)
        part = partial(self.scoring.scorer.score, scan.whole.model, branches, policy, scan.lease)
        scores = await (part() if first else self.retries.score(part, scan.whole.model.name))
        return _Part(ids, prepared.tokens, scores)

    def _taken(self, scan: Scan, part: _Part) -> list[Result]:
        """Count the cost of a part, and return its results."""
        account, scores, first = RequestContext.of(scan.request).account, part.scores, scan.items
        scan.items += len(part.ids)
        scan.hits += scores.hits
        scan.tokens += part.tokens
        scan.cached_tokens += scores.cached_tokens
        account.prompt_tokens, account.items = scan.tokens, scan.items
        account.cache_hits, account.cached_tokens = scan.hits, scan.cached_tokens
        account.queue_seconds = max(account.queue_seconds, scores.queue_seconds)
        self.scoring.telemetry.catalogues.scored(account.model, part.tokens, scores.cached_tokens)
        if scan.lease is not None:
            scan.lease.used_tokens = scan.tokens
        rows = zip(part.ids, scores.rows, strict=True)
        return [Result(first + place, id, row) for place, (id, row) in enumerate(rows)]


class Best:
    """The results with the highest ranks, in bounded memory.

    An item that changes during a scan may come twice, and its later result counts. If that has a lower rank, a result that the
    first one displaced is among the best again; :data:`SLACK` displaced results are kept for this.
    """

    def __init__(self, rank: Callable[[Row], float], most: int) -> None:
        self._rank = rank
        self._most = most
        self._kept: dict[str, tuple[float, Result]] = {}
        self._last = (math.inf, 0)
        """Place of the last of the best results so far, as :func:`_place` gives it."""

    def add(self, part: list[Result]) -> list[Result]:
        """Add results; return those that may be among the best. A later result of an item replaces an earlier one."""
        for result in part:
            self._kept[result.id] = (self._rank(result.row), result)
        overfull = len(self._kept) > self._most + 2 * SLACK
        if overfull or self._most < len(self._kept) <= 4 * SLACK:  # sorting more takes milliseconds, so it is done rarely
            ranked = sorted(self._kept.values(), key=_place)
            self._last = _place(ranked[self._most - 1])
            if overfull:
                self._kept = {result.id: (rank, result) for rank, result in ranked[: self._most + SLACK]}
        found = ((result, self._kept.get(result.id)) for result in part)
        return [result for result, kept in found if kept is not None and _place(kept) <= self._last]

    @property
    def results(self) -> list[Result]:
        """The best results, the highest rank first; of equal ones, the one that was scored first."""
        return [result for _, result in sorted(self._kept.values(), key=_place)[: self._most]]


def _place(kept: tuple[float, Result]) -> tuple[float, int]:
    """Return the place of a result in the order of ranks, as a value to sort by."""
    return -kept[0], kept[1].index


def _parts_at_one_time(whole: Whole) -> int:
    return min(MOST_PARTS, PARTS_PER_ENGINE * max(1, len(whole.model.ready)))


def check_whole(body: Body[Any], *, top_n: int | None, stream: bool) -> None:
    """Refuse a request for a whole catalogue that cannot be answered within bounds. Raises :class:`InvalidRequest`."""
    if not stream and not top_n:
        raise InvalidRequest("A request for a whole catalogue needs `top_n` or `stream`; or name items in `ids`.", param="ids")
    if (top_n or 0) > MAX_ITEMS:
        raise InvalidRequest(f"`top_n` of a catalogue is at most {MAX_ITEMS}.", param="top_n")
    if len(body.content) > INLINE_BYTES:
        message = f"A request for a whole catalogue has at most {INLINE_BYTES} bytes; shorten the query."
        raise InvalidRequest(message, param="query")


def _expected(whole: Whole, prepared: Prepared, first: bytes) -> int:
    """Return about the number of tokens of all prompts."""
    behind = len(prepared.rows[0]) - tokens_of(first) + len(prepared.suffix)
    return whole.state.tokens + behind * whole.state.items
