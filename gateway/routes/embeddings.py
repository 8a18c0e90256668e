"""``POST /v1/embeddings``, ``/embeddings`` and ``/embed``, and Cohere's ``/v1/embed`` and ``/v2/embed``."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.cache.base import Row
from gateway.errors import InvalidRequest
from gateway.handling.access import priority_of, requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.large import listed, with_lists, with_rows
from gateway.handling.reader import Reader
from gateway.handling.scoring import Scoring, ScoringJob, fitted_of, headers_of
from gateway.ids import new_id
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.schemas.cohere import CohereEmbeddings, CohereEmbedRequest, EmbeddingType, EmbedMeta, EmbedUnits
from gateway.schemas.embeddings import EmbeddingEntry, EmbeddingsRequest, EmbeddingsResponse
from gateway.schemas.rerank import ApiVersion
from gateway.schemas.usage import PromptTokensDetails, Usage

MAX_NUMBERS = 1 << 22
"""Most numbers of an answer, such as 1,024 embeddings of 4,096; the gateway holds them all, in about 130 MiB."""
LARGE_EMBEDDINGS = 4000
"""Numbers of an answer above which it is built in slices; this many take about a millisecond."""


def embeddings_routes(pool: Pool, reader: Reader, scoring: Scoring) -> list[HTTPRouteHandler]:
    """Create the routes."""

    @post_json(["/v1/embeddings", "/embeddings", "/embed"], EmbeddingsRequest, "scoring")
    async def embed(request: Request[Any, Any, Any], data: JSONBody[Body[EmbeddingsRequest]]) -> Response[EmbeddingsResponse]:
        """Embed texts.

        Queries and documents are prompted as the model's preset prescribes. With `inputs`, the answer has the form of Text
        Embeddings Inference: a list of lists of numbers. Embeddings are cached like the scores of `/v1/score`.
        """
        async with reader.open(request, EmbeddingsRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            fitted_of(request, model, "embed")
            readout = readout_of(model, fields)
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        check_numbers(len(prepared.rows), readout, model, "input" if fields.inputs is None else "inputs")
        job = ScoringJob(
            request=request,
            model=model,
            prepared=prepared,
            readout=readout,
            priority=priority,
            cache_salt=fields.cache_salt,
        )
        scores = await scoring.score(job)
        headers = headers_of(prepared, scores)
        large = sum(map(len, scores.rows)) > LARGE_EMBEDDINGS
        if fields.inputs is not None:
            return await listed(scores.rows, large=large, headers=headers)
        tokens = prepared.tokens
        usage = Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens))
        answer = EmbeddingsResponse(data=[], model=model.name, usage=usage)
        return await with_rows(answer, "data", _entries(scores.rows, fields.encoding_format), large=large, headers=headers)

    @post_json(["/v1/embed", "/v2/embed"], CohereEmbedRequest, "scoring")
    async def embed_cohere(request: Request[Any, Any, Any], data: JSONBody[Body[CohereEmbedRequest]]) -> Response[CohereEmbeddings]:
        """Embed texts, in the form of Cohere.

        Texts that are longer than the model's context are cut at their end unless `truncate` says otherwise.
        """
        async with reader.open(request, CohereEmbedRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            fitted_of(request, model, "embed")
            readout = readout_of(model, EmbeddingsRequest(dimensions=fields.output_dimension), "output_dimension")
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        kinds: Sequence[EmbeddingType] = list(dict.fromkeys(fields.embedding_types or ["float"]))
        check_numbers(len(prepared.rows) * len(kinds), readout, model, "texts")
        job = ScoringJob(request=request, model=model, prepared=prepared, readout=readout, priority=priority, cache_salt=None)
        scores = await scoring.score(job)
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


def readout_of(model: ServedModel, fields: EmbeddingsRequest, param: str = "dimensions") -> wire.Embedding:
    """Return the readout. ``param``: the client's name of ``dimensions``. Raises :class:`InvalidRequest`."""
    most = model.info.embedding_size
    if fields.dimensions is not None and fields.dimensions > most:
        message = f"`{param}` is {fields.dimensions}; embeddings of {model.name!r} have {most} numbers."
        raise InvalidRequest(message, param=param)
    return wire.Embedding(fields.dimensions, normalize=fields.normalize is not False)


def check_numbers(texts: int, readout: wire.ScoreReadout, model: ServedModel, param: str) -> None:
    """Raise :class:`InvalidRequest` if the embeddings have too many numbers. ``param``: the field with the texts."""
    numbers = texts * wire.row_length(readout, (), model.info)
    if numbers > MAX_NUMBERS:
        message = f"{texts} embeddings have {numbers} numbers; at most {MAX_NUMBERS} are answered at once. Send several requests."
        raise InvalidRequest(message, param=param)


def _entries(rows: Sequence[Row], form: str | None) -> Iterator[EmbeddingEntry]:
    for index, row in enumerate(rows):
        yield EmbeddingEntry(index=index, embedding=_base64(row) if form == "base64" else row)


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
    "ubinary": lambda row: list(_bits(row)),
    "binary": lambda row: [byte - 128 for byte in _bits(row)],
}
"""Forms of an embedding in Cohere's answer."""
