"""``POST /v1/embeddings``, ``/embeddings`` and ``/embed``."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from engine import wire
from gateway.auth.tenancy import priority_of
from gateway.cache.base import Row
from gateway.errors import InvalidRequest
from gateway.handling.access import requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.large import listed, with_rows
from gateway.handling.reader import Reader
from gateway.handling.scoring import Scoring, ScoringJob, fitted_of, headers_of
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.schemas.embeddings import EmbeddingEntry, EmbeddingsRequest, EmbeddingsResponse
from gateway.schemas.usage import PromptTokensDetails, Usage

MAX_NUMBERS = 1 << 22
"""Most numbers of an answer, such as 1,024 embeddings of 4,096; the gateway holds them all, in about 130 MiB."""
LARGE_NUMBERS = 4000
"""Numbers of an answer above which it is built in slices; this many take about a millisecond."""


def embeddings_route(pool: Pool, reader: Reader, scoring: Scoring) -> HTTPRouteHandler:
    """Create the route."""

    @post_json(["/v1/embeddings", "/embeddings", "/embed"], EmbeddingsRequest, "scoring")
    async def embed(request: Request[Any, Any, Any], data: JSONBody[Body[EmbeddingsRequest]]) -> Response[EmbeddingsResponse]:
        """Embed texts.

        Queries and documents are prompted as the model's preset prescribes. With `inputs`, the answer has the form of Text
        Embeddings Inference: a list of lists of numbers. Embeddings are cached like the scores of `/v1/score`.
        """
        async with reader.open(request, EmbeddingsRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model)
            fitted_of(model, "embed")
            readout = _readout(model, fields)
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        _check_numbers(len(prepared.rows), readout, model)
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
        large = sum(map(len, scores.rows)) > LARGE_NUMBERS
        if fields.inputs is not None:
            return await listed(scores.rows, large=large, headers=headers)
        tokens = prepared.tokens
        usage = Usage(tokens, tokens, prompt_tokens_details=PromptTokensDetails(scores.cached_tokens))
        answer = EmbeddingsResponse(data=[], model=model.name, usage=usage)
        return await with_rows(answer, "data", _entries(scores.rows, fields.encoding_format), large=large, headers=headers)

    return embed


def _readout(model: ServedModel, fields: EmbeddingsRequest) -> wire.Embedding:
    most = model.info.embedding_size
    if fields.dimensions is not None and fields.dimensions > most:
        message = f"`dimensions` is {fields.dimensions}; embeddings of {model.name!r} have {most} numbers."
        raise InvalidRequest(message, param="dimensions")
    return wire.Embedding(fields.dimensions, normalize=fields.normalize is not False)


def _check_numbers(texts: int, readout: wire.Embedding, model: ServedModel) -> None:
    numbers = texts * wire.row_length(readout, (), model.info)
    if numbers > MAX_NUMBERS:
        message = f"{texts} embeddings have {numbers} numbers; at most {MAX_NUMBERS} are answered at once. Send several requests."
        raise InvalidRequest(message, param="input")


def _entries(rows: Sequence[Row], form: str | None) -> Iterator[EmbeddingEntry]:
    for index, row in enumerate(rows):
        yield EmbeddingEntry(index=index, embedding=_base64(row) if form == "base64" else row)


def _base64(row: Row) -> str:
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
