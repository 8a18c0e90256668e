"""Scores a whole catalogue: part by part, so that its items are in memory for a moment only and other requests run in between."""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from litestar import Request

from engine import wire
from gateway.auth.tenancy import caller_of, priority_of
from gateway.cache.base import Row
from gateway.cache.policy import CachePolicy
from gateway.catalogues.record import tokens_of
from gateway.context import RequestContext
from gateway.errors import InvalidRequest
from gateway.handling.body import Body
from gateway.handling.catalogue_prompts import CataloguePrompts, Whole
from gateway.handling.reader import INLINE_BYTES, Reading
from gateway.handling.retry_deadline import RetryDeadline
from gateway.handling.scoring import Scoring
from gateway.handling.streams import while_connected
from gateway.limits.base import Lease
from gateway.pool.prompts import Prompts
from gateway.presets.fitted import Fitted
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.score import ScoreRequest
from gateway.schemas.truncation import MAX_ITEMS
from gateway.text.prepared import Prepared

SLACK = 1000
"""Results that may be kept besides many best ones, because sorting thousands takes milliseconds."""


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
    whole: Whole
    fitted: Fitted | None = None
    """The preset whose formula ranks the items; None reads the labels of the request or of the catalogue."""
    relative: bool
    """Whether labels are compared with each other only, so that logits serve as log-probabilities do."""
    priority: int
    cache_salt: str | None
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
        return Scan(request=request, body=body, whole=whole, relative=relative, priority=priority, cache_salt=fields.cache_salt)

    async def best(self, scan: Scan, rank: Callable[[Row], float], most: int) -> list[Result]:
        """Return the ``most`` items with the highest ranks, the highest first. Raises :class:`GatewayError`."""
        best = Best(rank, most)
        async with while_connected(scan.request.scope), aclosing(self.parts(scan)) as parts:
            async for part in parts:
                best.add(part)
        return best.results

    async def parts(self, scan: Scan) -> AsyncGenerator[list[Result], None]:
        """Yield the results of all items, part by part. Raises :class:`GatewayError`."""
        account = RequestContext.of(scan.request).account
        caller, policy = caller_of(scan.request, cache_salt=scan.cache_salt), CachePolicy.of(scan.request)
        model = scan.whole.model
        lease: Lease | None = None
        charged = False
        async with aclosing(self.prompts.pages(scan.whole)) as pages:
            async for page in pages:
                ids, records = [id for id, _ in page], [record for _, record in page]
                spec = scan.whole.state.spec
                prepared = await self.prompts.rows(scan.body, model, spec, records, "ids", reads_labels=scan.fitted is None)
                scan.labels = prepared.labels
                if not charged:
                    charged = True
                    expected = _expected(scan.whole, prepared, records[0])
                    lease = await self.scoring.quotas.charge(scan.request, tokens=expected, items=scan.whole.state.items)
                raw = scan.relative and len(prepared.labels) > 1
                readout = wire.Labels(prepared.labels, raw=raw) if scan.fitted is None else scan.fitted.readout
                branches = Prompts((), prepared.rows, readout, scan.priority, caller, prepared.suffix)
                part = partial(self.scoring.scorer.score, model, branches, policy, lease)
                scores = await (self.retries.score(part, model.name) if scan.items else part())
                first = scan.items
                scan.items += len(ids)
                scan.hits += scores.hits
                scan.tokens += prepared.tokens
                scan.cached_tokens += scores.cached_tokens
                account.prompt_tokens, account.items = scan.tokens, scan.items
                account.cache_hits, account.cached_tokens = scan.hits, scan.cached_tokens
                account.queue_seconds = max(account.queue_seconds, scores.queue_seconds)
                if lease is not None:
                    lease.used_tokens = scan.tokens
                rows = zip(ids, scores.rows, strict=True)
                yield [Result(first + place, id, row) for place, (id, row) in enumerate(rows)]
        if not charged:
            await self.scoring.quotas.charge(scan.request, tokens=0)
        self.scoring.telemetry.scored(account)


class Best:
    """The results with the highest ranks, in bounded memory."""

    def __init__(self, rank: Callable[[Row], float], most: int) -> None:
        self._rank = rank
        self._most = most
        self._kept: dict[str, tuple[float, Result]] = {}

    def add(self, part: list[Result]) -> list[Result]:
        """Add results; return those that may be among the best. A later result of an item replaces an earlier one."""
        for result in part:
            self._kept[result.id] = (self._rank(result.row), result)
        if len(self._kept) > self._most + (SLACK if self._most > SLACK else 0):
            self._kept = {result.id: (rank, result) for rank, result in self._sorted()}
        return [result for result in part if result.id in self._kept]

    @property
    def results(self) -> list[Result]:
        """The best results, the highest rank first; of equal ones, the one that was scored first."""
        return [result for _, result in self._sorted()]

    def _sorted(self) -> list[tuple[float, Result]]:
        return heapq.nsmallest(self._most, self._kept.values(), key=lambda kept: (-kept[0], kept[1].index))


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
