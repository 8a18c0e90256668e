"""``POST /tokenize`` and ``/detokenize``, ``GET /tokenizer_info``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromQuery, JSONBody

from gateway.admission.quotas import Quotas
from gateway.handling.access import requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.large import encoded
from gateway.handling.openapi import READ_ERRORS, ApiOperation
from gateway.handling.reader import Reader
from gateway.http.context import RequestContext
from gateway.pool.pool import Pool
from gateway.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from gateway.text.prepared import Prepared
from gateway.workers.workers import Workers


def tokenize_routes(pool: Pool, reader: Reader, quotas: Quotas, workers: Workers) -> list[HTTPRouteHandler]:
    """Create the routes. No engine takes part: the text workers read the requests and encode the responses."""

    @post_json(["/tokenize", "/v1/tokenize"], TokenizeRequest, "tokens")
    async def tokenize(request: Request[Any, Any, Any], data: JSONBody[Body[TokenizeRequest]]) -> Response[TokenizeResponse]:
        """Convert a text or a conversation to token ids.

        The ids are those that `/v1/completions` and `/v1/chat/completions` use for the same `prompt` or `messages`. A text may be
        longer than the model's context.
        """
        async with reader.open(request, TokenizeRequest, data) as body:
            prepared = await body.read(requested_model(request, pool, body.fields.model))
        return await _charged(request, prepared)

    @post_json(["/detokenize", "/v1/detokenize"], DetokenizeRequest, "tokens")
    async def detokenize(request: Request[Any, Any, Any], data: JSONBody[Body[DetokenizeRequest]]) -> Response[DetokenizeResponse]:
        """Convert token ids to text, with special tokens."""
        async with reader.open(request, DetokenizeRequest, data) as body:
            prepared = await body.read(requested_model(request, pool, body.fields.model))
        return await _charged(request, prepared)

    async def _charged(request: Request[Any, Any, Any], prepared: Prepared) -> Response[Any]:
        """Charge the tokens like those of a prompt, and respond with the body that the reader has encoded."""
        RequestContext.of(request).account.prompt_tokens = prepared.tokens
        await quotas.charge(request, tokens=prepared.tokens)
        return encoded(prepared.response)

    @get("/tokenizer_info", responses=READ_ERRORS, operation_class=ApiOperation, tags=["tokens"])
    async def tokenizer_info(request: Request[Any, Any, Any], model: FromQuery[str | None] = None) -> TokenizerInfo:
        """Describe the tokeniser of `model`, which is optional if only one is served: its special tokens and its chat template."""
        served = requested_model(request, pool, model)
        files = workers.files(served.text)
        special = {name: text for name, text in files.special_tokens.items() if name in TokenizerInfo.__struct_fields__}
        return TokenizerInfo(model_max_length=served.context, chat_template=files.chat_template, **special)

    return [tokenize, detokenize, tokenizer_info]
