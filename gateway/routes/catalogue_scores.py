"""``POST /v1/score`` and ``/v1/rerank`` with all items of a catalogue, and the formulas that rank items of catalogues."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.cache.base import Row
from gateway.catalogues.catalogues import Spec
from gateway.errors import InvalidRequest
from gateway.handling.body import Body
from gateway.handling.catalogue_scan import Best, Result, Scan, Scanner
from gateway.handling.large import event_with_rows, with_rows
from gateway.handling.reader import Reading
from gateway.handling.scoring import fitted_of, per_event
from gateway.handling.streams import DONE, sse
from gateway.ids import new_id
from gateway.pool.placement import cut
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted, Preset
from gateway.process.time_slices import TimeSlice
from gateway.routes.score_forms import LARGE_SCORES, LabelForm, ScoreAnswer, check_score
from gateway.schemas.rerank import RerankChunk, RerankMeta, RerankRequest, RerankResponse, RerankResult, RerankTokens
from gateway.schemas.score import ScoreChunk, ScoreRequest, ScoreResponse
from gateway.schemas.usage import PromptTokensDetails, Usage

_BY_LABELS = Preset(name="catalogue", task="rerank")
"""The formula for items of a catalogue: the probability of the first label among all."""
LARGE_RESULTS = 500
"""Number of results of a rerank above which the response is built in slices; this many take about a millisecond."""


@dataclass(frozen=True)
class _Form:
    """How an endpoint answers."""

    field: str
    """Field of the answer that holds the results."""
    large: int
    """Number of results above which the answer is built in slices."""
    rank: Callable[[Row], float]
    """Returns the rank of an item; the best one has the highest."""
    row: Callable[[Result], object]
    """Returns a result of the answer."""
    chunk: Callable[[list[Result]], msgspec.Struct]
    """Returns an event with some results."""
    closing: Callable[[list[Result]], msgspec.Struct]
    """Returns the answer without results, when the scan has ended. It gets the best ones."""


async def score_catalogue(
    scanner: Scanner, request: Request[Any, Any, Any], data: Body[ScoreRequest], body: Reading[ScoreRequest]
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
            usage=_usage(scan),
            ids=[result.id for result in best],
        )

    form = _Form(
        LabelForm.field,
        LARGE_SCORES,
        rank=labels.rank,
        row=lambda result: labels.item(result.index, result.id, result.row).scores,
        chunk=lambda results: ScoreChunk(id=id, data=[labels.item(result.index, result.id, result.row) for result in results]),
        closing=closing,
    )
    return await _answer(scanner, scan, form, stream=bool(fields.stream), top_n=fields.top_n or 0)


async def rerank_catalogue(
    scanner: Scanner, request: Request[Any, Any, Any], data: Body[RerankRequest], body: Reading[RerankRequest]
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
            usage=_usage(scan),
            meta=RerankMeta(tokens=RerankTokens(input_tokens=scan.tokens)),
        )

    form = _Form("results", LARGE_RESULTS, rank, row, lambda results: RerankChunk(id=id, results=[*map(row, results)]), closing)
    return await _answer(scanner, scan, form, stream=bool(fields.stream), top_n=fields.top_n or 0)


async def _answer(scanner: Scanner, scan: Scan, form: _Form, *, stream: bool, top_n: int) -> Response[Any]:
    """Return the ``top_n`` best items, or with ``stream`` the results as they become known. Raises :class:`GatewayError`."""
    if stream:
        return scanner.scoring.streams.response(_events(scanner, scan, form, top_n), scan.request)
    best = await scanner.best(scan, form.rank, top_n)
    headers = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}
    return await with_rows(form.closing(best), form.field, map(form.row, best), large=len(best) > form.large, headers=headers)


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


def _usage(scan: Scan) -> Usage:
    return Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens))


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
