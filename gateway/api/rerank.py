"""``POST /v1/rerank``, ``/v2/rerank``, ``/rerank`` and ``/v1/ranking``."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.gateway.api.access import requested_model
from yardstick_llm.gateway.api.answers import listed, sse, with_rows
from yardstick_llm.gateway.api.catalogue_scores import Scanner, by_labels, preset_of, rerank_catalogue
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.api.scoring import Scoring, ScoringJob, fitted_of, headers_of, shared_fields, usage_of
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.presets.preset import Fitted
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.requests.rerank import (
    Ranking,
    Rankings,
    RerankChunk,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankTokens,
    TeiRank,
    TextDocument,
)
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.scoring.scorer import Row, Scores
from yardstick_llm.gateway.text.prepared import Prepared

PATHS = ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/ranking", "/v1/retrieval/nvidia/reranking"]


def rerank_route(pool: Pool, reader: Reader, scoring: Scoring, scanner: Scanner) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(PATHS, "scoring")
    async def rerank(request: AnyRequest, data: JSONBody[Body[RerankRequest]]) -> Response[RerankResponse]:
        """Order documents by their relevance to a query, the most relevant first.

        The model's preset says how it is prompted, and how a score follows from its answer; `/v1/models` shows it. Requests may
        have the form of Cohere, Jina, vLLM (`documents`), Text Embeddings Inference (`texts`), whose answer is a bare list, or
        NVIDIA (`passages`), whose answer has logits. A text that is too long is an error unless the request allows cutting it.
        Scores are cached like those of `/v1/score`.
        """
        body = await reader.body(request, RerankRequest, data)
        fields = body.fields
        _check(fields)
        if fields.catalogue is not None and fields.ids is None:
            return await rerank_catalogue(scanner, request, data, body)
        if fields.catalogue is not None:
            items = await scanner.find(request, fields.catalogue, fields.ids or [], fields.model)
            model = items.model
            preset = preset_of(request, model, items.spec)
            prepared = await scanner.read(body, items, reads_labels=preset is None)
            fitted = preset or by_labels(prepared.labels)
        else:
            model = requested_model(request, pool, fields.model)
            fitted = fitted_of(request, model, "rerank")
            prepared = await body.read(model)
        id, raw = f"rerank-{new_id()}", fields.raw or fields.passages is not None
        job = ScoringJob(body, model, prepared, fitted.readout, partial=bool(fields.partial_results))
        if fields.stream:

            def chunk(results: list[tuple[int, Row]]) -> RerankChunk:
                ranks = [(index, fitted.score(row, raw=raw)) for index, row in results]
                return RerankChunk(id=id, results=list(_results(ranks, prepared)))

            async def last(scores: Scores) -> bytes:
                return sse(_answer(id, job, scores))

            return await scoring.stream(job, chunk, last)
        scores = await scoring.score(job)
        ranks = (await ranked(fitted, prepared, scores, raw=raw))[: fields.top_n or None]
        headers, numbers = headers_of(prepared, scores), 4 * len(ranks)
        if fields.texts is not None:
            return await listed(tei_ranks(ranks, prepared), numbers=numbers, headers=headers)
        if fields.passages is not None:
            rankings = Rankings(rankings=[], usage=usage_of(prepared, scores))
            rows = (Ranking(index=index, logit=score) for index, score in ranks)
            return await with_rows(rankings, "rankings", rows, numbers=numbers, headers=headers)
        return await with_rows(_answer(id, job, scores), "results", _results(ranks, prepared), numbers=numbers, headers=headers)

    return rerank


def _check(fields: RerankRequest) -> None:
    """Refuse fields that a stream cannot follow: it sends every result, in no order, in the form of Cohere."""
    if fields.ids is not None and fields.catalogue is None:
        raise InvalidRequest("`ids` goes with `catalogue`.", param="ids")
    whole = fields.catalogue is not None and fields.ids is None
    if whole and fields.return_item_usage:
        raise InvalidRequest("`return_item_usage` goes with `documents` or `ids`.", param="return_item_usage")
    if fields.stream and fields.top_n and not whole:
        raise InvalidRequest("`top_n` does not go with `stream`, which sends every result.", param="top_n")
    other = next((name for name in ("texts", "passages") if getattr(fields, name) is not None), None)
    wrong = next((name for name in ("return_item_usage", "stream") if getattr(fields, name)), None)
    if other is not None and wrong is not None:
        raise InvalidRequest(f"`{other}` does not go with `{wrong}`; send `documents`.", param=other)


def _answer(id: str, job: ScoringJob, scores: Scores) -> RerankResponse:
    """Return the answer without results."""
    meta = RerankMeta(
        tokens=RerankTokens(input_tokens=job.prepared.tokens),
        truncated=job.prepared.truncated,
        query_truncated=job.prepared.query_truncated,
    )
    return RerankResponse(object="rerank", results=[], meta=meta, **shared_fields(id, job, scores))


async def ranked(fitted: Fitted, prepared: Prepared, scores: Scores, *, raw: bool) -> list[tuple[int, float]]:
    """Return the index and score of each document, the most relevant first. The scores are computed in slices."""
    ranks, time_slice = [], TimeSlice()
    for index, row in zip(prepared.places, scores.rows, strict=True):
        if row:
            ranks.append((index, fitted.score(row, raw=raw)))
        if time_slice.over:
            await time_slice.yield_to_loop()
    return sorted(ranks, key=lambda rank: -rank[1])


def _results(ranks: list[tuple[int, float]], prepared: Prepared) -> Iterator[RerankResult]:
    for index, score in ranks:
        document = TextDocument(prepared.texts[index]) if prepared.texts else None
        id = prepared.ids[index] if prepared.ids is not None else msgspec.UNSET
        yield RerankResult(index=index, relevance_score=score, document=document, id=id)


def tei_ranks(ranks: list[tuple[int, float]], prepared: Prepared) -> Iterator[TeiRank]:
    """Yield the documents in the form of TEI."""
    for index, score in ranks:
        yield TeiRank(index=index, score=score, text=prepared.texts[index] if prepared.texts else None)
