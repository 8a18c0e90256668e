"""``POST /v1/rerank`` with all items of a catalogue, and the formulas that rank items of catalogues."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.cache.base import Row
from gateway.catalogues.store import Spec
from gateway.ids import new_id
from gateway.pool.replica import ServedModel
from gateway.pool.split import cut
from gateway.presets.fitted import Fitted
from gateway.presets.preset import Preset
from gateway.routes.body import Body
from gateway.routes.catalogue_scan import Best, Result, Scan, Scanner
from gateway.routes.large import with_rows
from gateway.routes.reading import Reading
from gateway.routes.scoring import RESULTS_PER_EVENT, fitted_of
from gateway.schemas.rerank import RerankChunk, RerankMeta, RerankRequest, RerankResponse, RerankResult, RerankTokens
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.streams import DONE, sse

_BY_LABELS = Preset(name="catalogue", task="rerank")
"""The formula for items of a catalogue: the probability of the first label among all."""
LARGE_RESULTS = 500
"""Number of results above which the response is built in slices; this many take about a millisecond."""


@dataclass(frozen=True)
class RankedCatalogue:
    """Ranks all items of a catalogue."""

    scanner: Scanner

    async def answer(
        self, request: Request[Any, Any, Any], data: Body[RerankRequest], body: Reading[RerankRequest]
    ) -> Response[RerankResponse]:
        """Return the best items, or with ``stream`` all results as they become known. Raises :class:`GatewayError`."""
        fields = body.fields
        scan = await self.scanner.open(request, data, body, relative=True)
        scan.fitted = preset_of(scan.whole.model, scan.whole.state.spec)
        raw, id = bool(fields.raw_scores), f"rerank-{new_id()}"

        def rank(row: Row) -> float:
            return (scan.fitted or by_labels(scan.labels)).score(row, raw=raw)

        if fields.stream:
            return self.scanner.scoring.streams.response(self._events(scan, rank, id, fields.top_n), request)
        best = await self.scanner.best(scan, rank, fields.top_n or 0)
        headers = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}
        results = _of_catalogue(best, rank)
        return await with_rows(_closing(scan, id), "results", results, large=len(best) > LARGE_RESULTS, headers=headers)

    async def _events(self, scan: Scan, rank: Callable[[Row], float], id: str, top_n: int | None) -> AsyncGenerator[bytes, None]:
        best = Best(rank, top_n or 0)
        async with aclosing(self.scanner.parts(scan)) as parts:
            async for part in parts:
                for few in cut(best.add(part) if top_n else part, RESULTS_PER_EVENT):
                    yield sse(RerankChunk(id=id, results=list(_of_catalogue(few, rank))))
        yield sse(msgspec.structs.replace(_closing(scan, id), results=list(_of_catalogue(best.results, rank))))
        yield DONE


def preset_of(model: ServedModel, spec: Spec) -> Fitted | None:
    """Return the preset that a catalogue was created with. It is still that of the model, as :func:`check_text` makes sure."""
    return fitted_of(model, "rerank") if spec.preset else None


def by_labels(labels: list[int]) -> Fitted:
    """Return the formula for a catalogue without a preset."""
    return Fitted(_BY_LABELS, [[label] for label in labels])


def _closing(scan: Scan, id: str) -> RerankResponse:
    return RerankResponse(
        id=id,
        object="rerank",
        created=int(time.time()),
        model=scan.whole.model.name,
        results=[],
        usage=Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens)),
        meta=RerankMeta(tokens=RerankTokens(input_tokens=scan.tokens)),
    )


def _of_catalogue(results: list[Result], rank: Callable[[Row], float]) -> Iterator[RerankResult]:
    return (RerankResult(index=result.index, relevance_score=rank(result.row), id=result.id) for result in results)
