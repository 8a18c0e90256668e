"""``POST /v1/score``."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from gateway.errors import InvalidRequest
from gateway.ids import new_id
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.pool.split import cut
from gateway.routes.access import requested_model
from gateway.routes.body import Body, post_json
from gateway.routes.catalogue_scan import Best, Result, Scan, Scanner
from gateway.routes.large import with_rows
from gateway.routes.reading import Reader, Reading
from gateway.routes.score_forms import LabelForm, ScoreAnswer, form_of
from gateway.routes.scoring import RESULTS_PER_EVENT, Scoring, ScoringJob, fitted_of, headers_of, item_usage_of
from gateway.schemas.score import (
    ScoreChunk,
    ScoreRequest,
    ScoreResponse,
)
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.scoring.scorer import Scores
from gateway.streams import DONE, sse
from gateway.tenancy import priority_of

LARGE_SCORES = 2000
"""Number of scores above which the response is built in slices; this many take about a millisecond."""


def score_route(pool: Pool, reader: Reader, scoring: Scoring, scanner: Scanner) -> HTTPRouteHandler:
    """Create the route."""
    whole = _WholeCatalogue(scanner)

    @post_json(["/v1/score", "/score"], ScoreRequest, "scoring")
    async def score(request: Request[Any, Any, Any], data: JSONBody[Body[ScoreRequest]]) -> Response[ScoreAnswer]:
        """Score items against a query.

        Each item's prompt is the query and the item, tokenised exactly as the joined text. A score is the probability of a label as
        the next token: over the whole vocabulary, or with `apply_softmax` over the labels. An item's scores do not depend on the
        other items. With the readout `likelihood`, the answer is a list of `data` with the log-probability of each item's own
        tokens after the query. With `text_1` and `text_2` (vLLM's form) pairs of texts are scored as the model's preset prescribes,
        and the answer is a list of `data` with a `score` for each. `Cache-Control: no-cache` computes all scores again, and
        `no-store` also stores none; the response header `x-yardstick-cache` gives the number of items whose scores were reused.
        """
        async with reader.open(request, ScoreRequest, data) as body:
            fields = body.fields
            priority = priority_of(request, fields.priority)
            if fields.catalogue is not None and fields.ids is None:
                return await whole.answer(request, data, body)
            if fields.catalogue is not None:
                items = await scanner.prompts.find(request, fields.catalogue, fields.ids or [], fields.model)
                model, fitted = items.model, None
                _check(model, fields)
                prepared = await scanner.prompts.read(body, items)
            else:
                model = requested_model(request, pool, fields.model)
                fitted = fitted_of(model, "rerank") if fields.paired else None
                _check(model, fields)
                prepared = await body.read(model)
        form = form_of(fields, prepared, fitted)
        id = f"score-{new_id()}"

        def closing(scores: Scores) -> ScoreAnswer:
            usage = item_usage_of(prepared, scores, asked=fields.return_item_usage)
            return msgspec.structs.replace(form.answer(id, model, prepared, scores), item_usage=usage)

        job = ScoringJob(
            request=request,
            model=model,
            prepared=prepared,
            readout=form.readout,
            priority=priority,
            cache_salt=fields.cache_salt,
            partial=bool(fields.partial_results),
        )
        if fields.stream:
            return await scoring.stream(job, functools.partial(form.chunk, id), closing)
        scores = await scoring.score(job)
        large = form.numbers(scores) > LARGE_SCORES
        rows = form.rows(prepared, scores)
        return await with_rows(closing(scores), form.field, rows, large=large, headers=headers_of(prepared, scores))

    return score


@dataclass(frozen=True)
class _WholeCatalogue:
    """Scores all items of a catalogue."""

    scanner: Scanner

    async def answer(
        self, request: Request[Any, Any, Any], data: Body[ScoreRequest], body: Reading[ScoreRequest]
    ) -> Response[ScoreAnswer]:
        """Return the best items, or with ``stream`` all results as they become known. Raises :class:`GatewayError`."""
        fields = body.fields
        scan = await self.scanner.open(request, data, body)
        _check(scan.whole.model, fields)
        form, id = LabelForm([], softmax=bool(fields.apply_softmax)), f"score-{new_id()}"
        if fields.stream:
            return self.scanner.scoring.streams.response(self._events(scan, form, id, fields.top_n), request)
        best = await self.scanner.best(scan, form.rank, fields.top_n or 0)
        headers = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}
        rows = (form.item(result.index, result.id, result.row).scores for result in best)
        return await with_rows(self._closing(scan, id, best), "scores", rows, large=len(best) > LARGE_SCORES, headers=headers)

    async def _events(self, scan: Scan, form: LabelForm, id: str, top_n: int | None) -> AsyncGenerator[bytes, None]:
        best = Best(form.rank, top_n or 0)
        async with aclosing(self.scanner.parts(scan)) as parts:
            async for part in parts:
                for few in cut(best.add(part) if top_n else part, RESULTS_PER_EVENT):
                    yield sse(ScoreChunk(id=id, data=[form.item(result.index, result.id, result.row) for result in few]))
        kept = best.results
        scores = [form.item(result.index, result.id, result.row).scores for result in kept]
        yield sse(msgspec.structs.replace(self._closing(scan, id, kept), scores=scores))
        yield DONE

    def _closing(self, scan: Scan, id: str, best: list[Result]) -> ScoreResponse:
        return ScoreResponse(
            id=id,
            object="scoring",
            created=int(time.time()),
            model=scan.whole.model.name,
            scores=[],
            usage=Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens)),
            ids=[result.id for result in best],
        )


def _check(model: ServedModel, fields: ScoreRequest) -> None:
    given = next((name for name in ("ids", "top_n") if getattr(fields, name) is not None), None)
    if given is not None and fields.catalogue is None:
        more = " Without it, every item is scored; sort the answer." if given == "top_n" else ""
        raise InvalidRequest(f"`{given}` goes with `catalogue`.{more}", param=given)
    if fields.return_item_usage and fields.catalogue is not None and (fields.ids is None or fields.top_n):
        raise InvalidRequest("`return_item_usage` goes with `items`, or with `ids` without `top_n`.", param="return_item_usage")
    if not fields.paired and "score" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not score; use /v1/completions.", param="model")
