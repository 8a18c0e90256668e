"""Endpoints of Text Embeddings Inference (TEI) that depend on the model's task, and ``GET /info``.

``/embed``, ``/rerank`` and ``/tokenize`` are with the other forms of these requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import mul
from typing import Any

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromQuery, JSONBody

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import requested_model
from yardstick_llm.gateway.api.answers import listed
from yardstick_llm.gateway.api.openapi import READ_ERRORS, ApiOperation
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.api.rerank import ranked, tei_ranks
from yardstick_llm.gateway.api.scoring import MAX_NUMBERS, Scoring, ScoringJob, fitted_of, headers_of
from yardstick_llm.gateway.api.texts import (
    check_numbers,
    class_names,
    is_query,
    probabilities,
    readout_of,
    require,
)
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel, paths_of
from yardstick_llm.gateway.presets.preset import Fitted, Task, sigmoid, softmax
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.requests.rerank import RerankRequest
from yardstick_llm.gateway.requests.score import ScoreRequest
from yardstick_llm.gateway.requests.tei import (
    Prediction,
    Sentences,
    SparseValue,
    TaskRequest,
    TeiInfo,
    TeiParameters,
    TeiRequest,
    request_of_task,
)
from yardstick_llm.gateway.requests.texts import ClassifyRequest, EmbeddingsRequest
from yardstick_llm.gateway.schemas.common import MAX_ITEMS
from yardstick_llm.gateway.scoring.scorer import Row, Scores
from yardstick_llm.gateway.scoring.similarity import vectors_of
from yardstick_llm.gateway.text.prepared import Prepared
from yardstick_llm.tracing.version import project_version

SIMILARITY = {"inputs": {"source_sentence": "red running shoes", "sentences": ["blue running shoes", "oak table"]}}
"""Example of a body of ``/similarity``."""


def tei_routes(pool: Pool, reader: Reader, scoring: Scoring) -> list[HTTPRouteHandler]:
    """Create the routes."""

    @post_json("/", "scoring")
    async def infer(request: AnyRequest, data: JSONBody[Body[TeiRequest]]) -> Response[Any]:
        """Embed, classify or rerank, by the task of the model, in the form of Text Embeddings Inference.

        Hugging Face's `InferenceClient` posts `feature_extraction`, `sentence_similarity` and `text_classification` here.
        """
        return await answer(request, data, TaskRequest)

    @post_json("/predict", "scoring")
    async def predict(request: AnyRequest, data: JSONBody[Body[TeiRequest]]) -> Response[Any]:
        """Classify a text, a list of lists of one text or, with an encoder, pairs of texts such as premise and hypothesis; with a
        reranker, score pairs. The form is that of Text Embeddings Inference, and the most probable class comes first."""
        return await answer(request, data, ClassifyRequest | ScoreRequest)

    @post_json("/similarity", "scoring", example=SIMILARITY)
    async def similarity(request: AnyRequest, data: JSONBody[Body[TeiRequest]]) -> Response[Any]:
        """Return the cosine similarity of a sentence to each of several others, in the form of Text Embeddings Inference."""
        return await answer(request, data, Sentences)

    @post_json("/embed_all", "scoring")
    async def embed_all(request: AnyRequest, data: JSONBody[Body[TeiRequest]]) -> Response[Any]:
        """Return a vector for each token of each text, in the form of Text Embeddings Inference. The vectors are not scaled."""
        return await answer(request, data, EmbeddingsRequest, wire.TokenVectors(normalize=False))

    @post_json("/embed_sparse", "scoring")
    async def embed_sparse(request: AnyRequest, data: JSONBody[Body[TeiRequest]]) -> Response[Any]:
        """Return a weight for some tokens of the vocabulary, for each text, in the form of Text Embeddings Inference. With
        `prompt_name` `query`, a model that has weights of its own for a query's tokens returns these."""
        return await answer(request, data, EmbeddingsRequest, wire.Sparse())

    async def answer(
        request: AnyRequest, data: Body[TeiRequest], accepts: Any, asks: wire.TokenVectors | wire.Sparse | None = None
    ) -> Response[Any]:
        """Answer a request whose form, or whose form of ``inputs``, is one of ``accepts``. ``asks``: the readout, if the path says
        it."""
        body = await reader.body(request, TeiRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        if asks is not None:
            require(model, "sparse" if isinstance(asks, wire.Sparse) else "token_vectors", "model")
        asked, fitted = _of_task(request, model, fields)
        if not isinstance(asked, accepts) and not isinstance(fields.inputs, accepts):
            message = f"{request.scope['path']} does not take this; see /schema for its fields, and the endpoint / for all forms."
            raise InvalidRequest(message, param="query" if fields.inputs is None else "inputs")
        embeds = isinstance(asked, EmbeddingsRequest)
        if isinstance(asks, wire.Sparse) and isinstance(asked, EmbeddingsRequest):
            asks = wire.Sparse(query=is_query(asked))
        readout = asks or (readout_of(model, asked) if isinstance(asked, EmbeddingsRequest) else fitted.readout)
        prepared = await body.read(model)
        if embeds:
            check_numbers(prepared, readout, model, "inputs")
        scores = await scoring.score(ScoringJob(body, model, prepared, readout))
        if asks is not None:
            size = model.info.token_vector_size
            rows = (_weights(row) if isinstance(asks, wire.Sparse) else vectors_of(row, size) for row in scores.rows)
            return await listed(rows, numbers=sum(map(len, scores.rows)), headers=headers_of(prepared, scores))
        return await _answered(fields, asked, fitted, model, prepared, scores)

    @get("/info", responses=READ_ERRORS, operation_class=ApiOperation, tags=["models"])
    async def info(request: AnyRequest, model: FromQuery[str | None] = None) -> TeiInfo:
        """Describe `model`, which is optional if only one is served, in the form of Text Embeddings Inference."""
        served = requested_model(request, pool, model)
        fitted = served.tokenizer.table.fitted
        most = min(MAX_ITEMS, reader.bounds.max_request_tokens // served.context, MAX_NUMBERS // (served.info.embedding_size or 1))
        return TeiInfo(
            model_id=served.name,
            model_type=_model_type(served),
            max_input_length=served.context,
            max_batch_tokens=reader.bounds.max_request_tokens,
            max_client_batch_size=max(1, most),
            auto_truncate=served.info.encoder or (fitted is not None and fitted.preset.max_length is not None),
            version=project_version(),
        )

    return [infer, predict, similarity, embed_all, embed_sparse, info]


def _classifies(fitted: Fitted | None) -> bool:
    return fitted is not None and fitted.preset.task == "classify"


def _of_task(request: AnyRequest, model: ServedModel, fields: TeiRequest) -> tuple[TaskRequest, Fitted]:
    """Return the request of the model's task, and the model's preset. Raises :class:`InvalidRequest`."""
    fitted = model.tokenizer.table.fitted
    asked = request_of_task(fields, None if fitted is None else fitted.preset.task)
    needed: Task = "rerank"
    if isinstance(asked, EmbeddingsRequest):
        needed = "embed"
    elif isinstance(asked, ClassifyRequest) or (isinstance(asked, ScoreRequest) and _classifies(fitted)):
        needed = "classify"
    elif fitted is None:
        raise InvalidRequest(f"The model {model.name!r} has no task of this endpoint; it serves {paths_of(model)}.", param="model")
    return asked, fitted_of(request, model, needed)


async def _answered(
    fields: TeiRequest, asked: TaskRequest, fitted: Fitted, model: ServedModel, prepared: Prepared, scores: Scores
) -> Response[Any]:
    """Return the answer in the form of TEI."""
    headers, numbers = headers_of(prepared, scores), sum(map(len, scores.rows))
    if isinstance(asked, EmbeddingsRequest):
        if isinstance(fields.inputs, Sentences):
            return await listed(await _similarities(scores.rows), numbers=len(scores.rows), headers=headers)
        return await listed(scores.rows, numbers=numbers, headers=headers)
    if isinstance(asked, RerankRequest):
        ranks = await ranked(fitted, prepared, scores, raw=fields.raw)
        return await listed(tei_ranks(ranks, prepared), numbers=4 * len(ranks), headers=headers)
    if isinstance(asked, ClassifyRequest) or _classifies(fitted):
        predictions = _classes(fields, fitted, model, scores.rows)
    else:
        (label, *_) = class_names(fitted, model)
        predictions = ([Prediction(label=label, score=fitted.score(row, raw=fields.raw))] for row in scores.rows)
    # InferenceClient, which alone sends `parameters`, reads the first list of a list
    single = not fields.batched and fields.parameters is None
    return await listed(next(predictions) if single else predictions, numbers=0 if single else 4 * numbers, headers=headers)


def _weights(row: Row) -> list[SparseValue]:
    return [SparseValue(index=int(id), value=weight) for id, weight in zip(row[::2], row[1::2], strict=True)]


async def _similarities(rows: Sequence[Row]) -> list[float]:
    """Return the similarity of each embedding but the last to the last. All have length 1."""
    found, time_slice = [], TimeSlice()
    for row in rows[:-1]:
        found.append(math.fsum(map(mul, row, rows[-1])))
        if time_slice.over:
            await time_slice.yield_to_loop()
    return found


def _classes(fields: TeiRequest, fitted: Fitted, model: ServedModel, rows: Sequence[Row]) -> Iterator[list[Prediction]]:
    """Yield the classes of each text, the most probable first. With categories, each text has two rows."""
    options, names = fields.parameters or TeiParameters(), class_names(fitted, model)
    function = options.function_to_apply
    for row in rows[:: 2 if fitted.categories else 1]:
        numbers = probabilities(fitted, row, model.info, raw=fields.raw or function is not None)
        if function == "softmax":
            numbers = softmax(numbers)
        elif function == "sigmoid":
            numbers = [sigmoid(number) for number in numbers]
        best = sorted(zip(names, numbers, strict=True), key=lambda found: -found[1])
        yield [Prediction(label=name, score=score) for name, score in best[: options.top_k]]


def _model_type(model: ServedModel) -> dict[str, dict[str, Any]]:
    """Return TEI's description of the model's task."""
    fitted = model.tokenizer.table.fitted
    if fitted is None:
        return {}
    if fitted.preset.task == "embed":
        pooling = model.info.pooling or ("splade" if "sparse" in model.info.capabilities else "")
        return {"embedding": {"pooling": "last_token" if pooling == "last" else pooling} if pooling else {}}
    names = class_names(fitted, model)[: 1 if fitted.preset.task == "rerank" else None]
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    return {"reranker" if fitted.preset.task == "rerank" else "classifier": classes}
