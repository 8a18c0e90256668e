"""``POST /v1/score``: route and answer."""

from __future__ import annotations

import functools

from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.gateway.api.access import requested_model
from yardstick_llm.gateway.api.answers import event_with_rows, with_rows
from yardstick_llm.gateway.api.catalogue_scores import Scanner, score_catalogue
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.api.scoring import (
    ScoreAnswer,
    Scoring,
    ScoringJob,
    check_score,
    fitted_of,
    form_of,
    headers_of,
    shared_fields,
)
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.requests.score import ScoreRequest
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.scoring.scorer import Scores


def score_route(pool: Pool, reader: Reader, scoring: Scoring, scanner: Scanner) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(["/v1/score", "/score"], "scoring")
    async def score(request: AnyRequest, data: JSONBody[Body[ScoreRequest]]) -> Response[ScoreAnswer]:
        """Score items against a query.

        Each item's prompt is the query and the item, tokenised exactly as the joined text. A score is the probability of a label as
        the next token: over the whole vocabulary, or with `apply_softmax` over the labels. An item's scores do not depend on the
        other items. With the readout `likelihood`, the answer is a list of `data` with the log-probability of each item's own
        tokens after the query. With `text_1` and `text_2` (vLLM's form) pairs of texts are scored as the model's preset prescribes,
        and the answer is a list of `data` with a `score` for each. `Cache-Control: no-cache` computes all scores again, and
        `no-store` also stores none; the response header `x-yardstick-cache` gives the number of items whose scores were reused.
        """
        body = await reader.body(request, ScoreRequest, data)
        fields = body.fields
        if fields.catalogue is not None and fields.ids is None:
            return await score_catalogue(scanner, request, data, body)
        if fields.catalogue is not None:
            items = await scanner.find(request, fields.catalogue, fields.ids or [], fields.model)
            model, fitted = items.model, None
            check_score(model, fields)
            prepared = await scanner.read(body, items)
        else:
            model = requested_model(request, pool, fields.model)
            fitted = fitted_of(request, model, "rerank") if fields.paired else None
            check_score(model, fields)
            prepared = await body.read(model)
        form = form_of(fields, prepared, fitted)
        id = f"score-{new_id()}"
        job = ScoringJob(body, model, prepared, form.readout, partial=bool(fields.partial_results))
        if fields.stream:

            async def last(scores: Scores) -> bytes:
                """Return the last event, which has the best items if there is a ``top_n``."""
                await form.arrange(scores)
                answer = form.answer(shared_fields(id, job, scores), scores)
                return await event_with_rows(answer, form.field, form.rows(prepared, scores) if fields.top_n else ())

            return await scoring.stream(job, functools.partial(form.chunk, id), last)
        scores = await scoring.score(job)
        await form.arrange(scores)
        answer, rows = form.answer(shared_fields(id, job, scores), scores), form.rows(prepared, scores)
        return await with_rows(answer, form.field, rows, numbers=form.numbers(scores), headers=headers_of(prepared, scores))

    return score
