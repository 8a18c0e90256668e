"""``POST /v1/rerank`` with all items of a catalogue, and the formulas that rank items of catalogues."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from litestar import Request, Response

from gateway.cache.base import Row
from gateway.catalogues.store import Spec
from gateway.errors import InvalidRequest
from gateway.handling.body import Body
from gateway.handling.catalogue_answers import answer_catalogue
from gateway.handling.catalogue_scan import Result, Scan, Scanner
from gateway.handling.reader import Reading
from gateway.handling.scoring import fitted_of
from gateway.ids import new_id
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted, Preset
from gateway.schemas.rerank import RerankChunk, RerankMeta, RerankRequest, RerankResponse, RerankResult, RerankTokens
from gateway.schemas.usage import PromptTokensDetails, Usage

_BY_LABELS = Preset(name="catalogue", task="rerank")
"""The formula for items of a catalogue: the probability of the first label among all."""
LARGE_RESULTS = 500
"""Number of results above which the response is built in slices; this many take about a millisecond."""


async def rerank_catalogue(
    scanner: Scanner, request: Request[Any, Any, Any], data: Body[RerankRequest], body: Reading[RerankRequest]
) -> Response[RerankResponse]:
    """Rank all items of a catalogue. Raises :class:`GatewayError`."""
    fields = body.fields
    scan = await scanner.open(request, data, body, relative=True)
    scan.fitted = preset_of(request, scan.whole.model, scan.whole.state.spec)
    form = _RankedCatalogue(scan, fields.raw, f"rerank-{new_id()}")
    return await answer_catalogue(scanner, form, stream=bool(fields.stream), top_n=fields.top_n)


@dataclass(frozen=True)
class _RankedCatalogue:
    field: ClassVar[str] = "results"
    large: ClassVar[int] = LARGE_RESULTS
    scan: Scan
    raw: bool
    id: str

    def rank(self, row: Row) -> float:
        return (self.scan.fitted or by_labels(self.scan.labels)).score(row, raw=self.raw)

    def rows(self, results: list[Result]) -> Iterator[RerankResult]:
        return (RerankResult(index=result.index, relevance_score=self.rank(result.row), id=result.id) for result in results)

    def chunk(self, results: list[Result]) -> RerankChunk:
        return RerankChunk(id=self.id, results=list(self.rows(results)))

    def closing(self, best: list[Result]) -> RerankResponse:  # noqa: ARG002 - each result has its id
        scan = self.scan
        return RerankResponse(
            id=self.id,
            object="rerank",
            created=int(time.time()),
            model=scan.whole.model.name,
            results=[],
            usage=Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens)),
            meta=RerankMeta(tokens=RerankTokens(input_tokens=scan.tokens)),
        )


def preset_of(request: Request[Any, Any, Any], model: ServedModel, spec: Spec) -> Fitted | None:
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
