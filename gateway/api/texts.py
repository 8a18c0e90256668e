"""``/v1/embeddings``, ``/v2/embed``, ``/classify`` and ``/v1/length``: routes and answers."""

from __future__ import annotations

import math
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import requested_model
from yardstick_llm.gateway.api.answers import listed, with_lists, with_rows
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.api.scoring import MAX_NUMBERS, Scoring, ScoringJob, fitted_of, headers_of, usage_of
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.length import intervals, require_lenvm, value_and_remaining
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.pool.fanout import usual_row
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.presets.preset import Fitted, sigmoid, softmax
from yardstick_llm.gateway.requests.length import LengthRequest, LengthResponse, Remaining
from yardstick_llm.gateway.requests.rerank import ApiVersion
from yardstick_llm.gateway.requests.texts import (
    QUERIES,
    Category,
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    CohereEmbeddings,
    CohereEmbedRequest,
    EmbeddingEntry,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbeddingType,
    EmbedMeta,
    EmbedUnits,
)
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.scoring.scorer import Row
from yardstick_llm.gateway.scoring.similarity import vectors_of
from yardstick_llm.gateway.text.prepared import Prepared


def classify_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(["/v1/classify", "/classify"], "scoring")
    async def classify(request: AnyRequest, data: JSONBody[Body[ClassifyRequest]]) -> Response[ClassifyResponse]:
        """Classify texts.

        A model with a classification head gives the probability of each class, and a reward model its reward. A guard model gives
        the probability of its verdicts and of the categories that it knows. Results are cached like those of `/v1/score`.
        """
        body = await reader.body(request, ClassifyRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        fitted = fitted_of(request, model, "classify")
        prepared = await body.read(model)
        scores = await scoring.score(ScoringJob(body, model, prepared, fitted.readout))
        names = class_names(fitted, model)
        rows = _classifications(fitted, model.info, names, scores.rows, raw=fields.raw)
        answer = ClassifyResponse(
            id=f"classify-{new_id()}",
            created=int(time.time()),
            model=model.name,
            classes=list(names),
            data=[],
            usage=usage_of(prepared, scores),
        )
        numbers = 4 * len(scores.rows) + sum(map(len, scores.rows))
        return await with_rows(answer, "data", rows, numbers=numbers, headers=headers_of(prepared, scores))

    return classify


def class_names(fitted: Fitted, model: ServedModel) -> Sequence[str]:
    """Return the names of the classes of a head, or of the preset's labels."""
    return model.info.classes if isinstance(fitted.readout, wire.Classes) else fitted.names


def probabilities(fitted: Fitted, row: Row, info: wire.Info, *, raw: bool) -> list[float]:
    """Return the probability of each class of a head, or of each label of a guard model.

    With ``raw``, return the numbers before the activation instead; for labels with categories, these are log-probabilities. A head
    with one class, a regression, and a head without an activation always return them.
    """
    if not isinstance(fitted.readout, wire.Classes):
        logits = fitted.label_logits(row)
        return logits if raw else softmax(logits)
    activation = fitted.preset.activation
    if raw or len(row) == 1 or info.regression or activation == "none":
        return list(row)
    return [sigmoid(logit) for logit in row] if info.multi_label or activation == "sigmoid" else softmax(row)


def _classifications(
    fitted: Fitted, info: wire.Info, names: Sequence[str], rows: Sequence[Row], *, raw: bool
) -> Iterator[Classification]:
    """Yield the classification of each text, with ``raw`` before the activation. With categories, each text has two rows."""
    step = 2 if fitted.categories else 1
    for index in range(len(rows) // step):
        row = rows[step * index]
        probs = probabilities(fitted, row, info, raw=raw)
        categories = _categories(fitted, rows[step * index + 1]) if fitted.categories else None
        label = names[max(range(len(probs)), key=probs.__getitem__)]
        yield Classification(index=index, label=label, probs=probs, num_classes=len(probs), categories=categories)


def _categories(fitted: Fitted, row: Row) -> list[Category]:
    assert fitted.preset.categories is not None
    named = zip(fitted.preset.categories.names.values(), fitted.category_logprobs(row), strict=True)
    categories = [Category(name=name, prob=math.exp(logprob)) for name, logprob in named]
    return sorted(categories, key=lambda category: -category.prob)


def embeddings_routes(pool: Pool, reader: Reader, scoring: Scoring) -> list[HTTPRouteHandler]:
    """Create the routes."""

    @post_json(["/v1/embeddings", "/embeddings", "/embed"], "scoring")
    async def embed(request: AnyRequest, data: JSONBody[Body[EmbeddingsRequest]]) -> Response[EmbeddingsResponse]:
        """Embed texts.

        Queries and documents are prompted as the model's preset prescribes. With `inputs`, the answer has the form of Text
        Embeddings Inference: a list of lists of numbers. Embeddings are cached like the scores of `/v1/score`.
        """
        body = await reader.body(request, EmbeddingsRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        fitted = fitted_of(request, model, "embed")
        readout = readout_of(model, fields)
        prepared = await body.read(model)
        check_numbers(prepared, readout, model, "input" if fields.inputs is None else "inputs")
        scores = await scoring.score(ScoringJob(body, model, prepared, readout))
        headers, numbers = headers_of(prepared, scores), sum(map(len, scores.rows))
        rows: Sequence[Row | list[Row]] = scores.rows
        if fields.embedding_type == "multi":
            skipped = set() if is_query(fields) else set(fitted.skipped)
            size, texts = model.info.token_vector_size, zip(scores.rows, prepared.rows, strict=True)
            # bge-m3's library leaves out the first token, whose state is the embedding of the text
            first = int("embed" in model.info.capabilities and fitted.preset.late_interaction is None)
            rows = [vectors_of(row[first * size :], size, ids[first:], skipped) for row, ids in texts]
        if fields.inputs is not None:
            return await listed(rows, numbers=numbers, headers=headers)
        answer = EmbeddingsResponse(data=[], model=model.name, usage=usage_of(prepared, scores))
        return await with_rows(answer, "data", _entries(rows, in_base64=fields.in_base64), numbers=numbers, headers=headers)

    @post_json(["/v1/embed", "/v2/embed"], "scoring")
    async def embed_cohere(request: AnyRequest, data: JSONBody[Body[CohereEmbedRequest]]) -> Response[CohereEmbeddings]:
        """Embed texts, in the form of Cohere.

        Texts that are longer than the model's context are cut at their end unless `truncate` says otherwise.
        """
        body = await reader.body(request, CohereEmbedRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        fitted_of(request, model, "embed")
        readout = readout_of(model, EmbeddingsRequest(output_dimension=fields.output_dimension))
        prepared = await body.read(model)
        kinds: Sequence[EmbeddingType] = list(dict.fromkeys(fields.embedding_types or ["float"]))
        check_numbers(prepared, readout, model, fields.param, forms=len(kinds))
        scores = await scoring.score(ScoringJob(body, model, prepared, readout))
        plain = fields.embedding_types is None and request.scope["path"].startswith("/v1/")
        answer = CohereEmbeddings(
            id=f"embed-{new_id()}",
            response_type="embeddings_floats" if plain else "embeddings_by_type",
            embeddings=[] if plain else {kind: [] for kind in kinds},
            texts=[],
            meta=EmbedMeta(ApiVersion(version=request.scope["path"][2]), EmbedUnits(prepared.tokens)),
        )
        lists: dict[str, Iterable[object]] = {"embeddings" if plain else kind: map(FORMS[kind], scores.rows) for kind in kinds}
        return await with_lists(answer, lists | {"texts": prepared.texts or []}, headers=headers_of(prepared, scores))

    return [embed, embed_cohere]


def readout_of(model: ServedModel, fields: EmbeddingsRequest) -> wire.Embedding | wire.TokenVectors:
    """Return the readout. Raises :class:`InvalidRequest`."""
    most, size, param = model.info.embedding_size, fields.dimensions or None, "dimensions"
    if fields.output_dimension is not None:
        if size is not None:
            raise InvalidRequest("Give either `dimensions` or `output_dimension`.", param="output_dimension")
        size, param = fields.output_dimension, "output_dimension"
    if fields.embedding_type == "multi":
        if size is not None:
            raise InvalidRequest(f"`{param}` does not go with `embedding_type` multi.", param=param)
        require(model, "token_vectors", "embedding_type")
        return wire.TokenVectors(normalize=fields.normalize is not False)
    require(model, "embed", "model")
    if size is not None and size > most:
        message = f"`{param}` is {size}; embeddings of {model.name!r} have {most} numbers."
        raise InvalidRequest(message, param=param)
    return wire.Embedding(size, normalize=fields.normalize is not False)


def require(model: ServedModel, capability: str, param: str) -> None:
    """Raise :class:`InvalidRequest` for a model without a kind of embedding."""
    if capability not in model.info.capabilities:
        kinds = {"embed": "embeddings of whole texts", "token_vectors": "token vectors", "sparse": "sparse embeddings"}
        has = " and ".join(name for each, name in kinds.items() if each in model.info.capabilities)
        raise InvalidRequest(f"The model {model.name!r} has no {kinds[capability]}; it has {has or 'none at all'}.", param=param)


def is_query(fields: EmbeddingsRequest) -> bool:
    """Whether the texts are queries."""
    return bool({fields.purpose, fields.prompt_name} & set(QUERIES)) or fields.instruction is not None


def check_numbers(prepared: Prepared, readout: wire.ScoreReadout, model: ServedModel, param: str, *, forms: int = 1) -> None:
    """Raise :class:`InvalidRequest` if the embeddings have too many numbers. ``param``: the field with the texts."""
    texts = len(prepared.rows) * forms
    numbers = forms * sum(usual_row(readout, row, model.info) for row in prepared.rows)
    if numbers > MAX_NUMBERS:
        message = f"{texts} embeddings have {numbers} numbers; at most {MAX_NUMBERS} are answered at once. Send several requests."
        raise InvalidRequest(message, param=param)


def _entries(rows: Sequence[Row | list[Row]], *, in_base64: bool) -> Iterator[EmbeddingEntry]:
    for index, row in enumerate(rows):
        numbers = row if not isinstance(row, list) else tuple(chain.from_iterable(row))
        yield EmbeddingEntry(index=index, embedding=_base64(numbers) if in_base64 else tuple(row))


def _base64(row: Row) -> str:
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()


def _bits(row: Row) -> bytes:
    """Return the signs of the numbers as bits, 1 for positive ones, the first in the highest bit of the first byte."""
    text = "".join("1" if number > 0 else "0" for number in row)
    size = -(-len(text) // 8)
    return int(text.ljust(8 * size, "0"), 2).to_bytes(size)


FORMS: dict[EmbeddingType, Callable[[Row], object]] = {
    "float": lambda row: row,
    "base64": _base64,
    "int8": lambda row: [round(127 * number) for number in row],
    "uint8": lambda row: [round(127 * number) + 128 for number in row],
    "ubinary": lambda row: list(_bits(row)),
    "binary": lambda row: [byte - 128 for byte in _bits(row)],
}
"""Forms of an embedding of length 1 in Cohere's answer. The range of ``int8`` is fixed: a server has no texts to calibrate one."""


def length_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/length", "length")
    async def length(request: AnyRequest, data: JSONBody[Body[LengthRequest]]) -> Response[LengthResponse]:
        """Estimate how much text is still to come.

        For each text, the length model's value and what it means in tokens. Give whole texts as `input`, or a `prompt` or
        `messages` with the `partial` answers that have been written so far. Values are cached like scores, see `/v1/score`.
        """
        body = await reader.body(request, LengthRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model)
        own_gamma = require_lenvm(model, "model")
        gamma = fields.gamma or own_gamma
        prepared = await body.read(model)
        values = await scoring.score(ScoringJob(body, model, prepared, wire.LengthValue()))
        answer = LengthResponse(
            id=f"length-{new_id()}",
            created=int(time.time()),
            model=model.name,
            gamma=gamma,
            data=[],
            usage=usage_of(prepared, values),
        )
        calibration = model.info.lenvm_calibration if gamma == own_gamma else None
        rows = (_remaining(index, logit, gamma, calibration) for index, (logit,) in enumerate(values.rows))
        return await with_rows(answer, "data", rows, numbers=4 * len(prepared.rows), headers=headers_of(prepared, values))

    return length


def _remaining(index: int, logit: float, gamma: float, calibration: wire.Calibration | None) -> Remaining:
    value, tokens = value_and_remaining(logit, gamma)
    bounds = None if calibration is None else intervals(calibration, value, tokens)
    return Remaining(index=index, value=value, remaining_tokens=tokens, intervals=bounds)
