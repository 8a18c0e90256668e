"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody

from gateway.errors import InvalidRequest
from gateway.generation.generation import prompt_ids
from gateway.generation.length import gamma_of_values, guidance_of, require_lenvm, thinking_limit, with_section
from gateway.generation.plan import check, plan
from gateway.handling.access import caller_of, priority_of, requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.chat_answer import ChatAnswer
from gateway.handling.generator import Generator
from gateway.handling.reader import Reader
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.schemas.chat import (
    ChatCompletion,
    ChatRequest,
)
from gateway.schemas.length_guidance import LengthGuidance
from gateway.text.prepared import as_list


def chat_route(pool: Pool, reader: Reader, generator: Generator) -> HTTPRouteHandler:
    """Create the route."""

    @post_json("/v1/chat/completions", ChatRequest, "generation")
    async def chat(request: Request[Any, Any, Any], data: JSONBody[Body[ChatRequest]]) -> Response[ChatCompletion]:
        """Answer a conversation.

        With `stream` the answer is a stream of server-sent events, each with the `delta` of an answer, and `[DONE]` at the end.
        """
        async with reader.open(request, ChatRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model, falls_back=True)
            logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
            _check(model, fields, logprobs)
            guidance = guidance_of(model, _with_budget(model, fields), logprobs=logprobs)
            priority = priority_of(request, fields.priority)
            prepared = await body.read(model)
        guidance = with_section(guidance, prepared.format)
        generation = plan(
            model,
            fields,
            as_list(prepared.rows[0]),
            max_tokens=_max_tokens(fields),
            logprobs=logprobs,
            guidance=guidance,
            thinking_limit=thinking_limit(fields.thinking_token_budget, prepared.format),
            grammar=prepared.grammar,
            bad_words=prepared.bad_words,
            param="messages",
            priority=priority,
            format=prepared.format,
            images=prepared.images,
            caller=caller_of(request, cache_salt=fields.cache_salt),
        )
        answer = ChatAnswer(model, fields, prompt_ids(generation, fields), gamma=gamma_of_values(model, guidance))
        return await generator.respond(request, [generation], answer, fields)

    return chat


def _check(model: ServedModel, data: ChatRequest, logprobs: int | None) -> None:
    check(model, data, logprobs=logprobs)
    if data.top_logprobs and not data.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")


def _with_budget(model: ServedModel, data: ChatRequest) -> ChatRequest:
    """Return the request with its budget of thinking as length guidance. Raises :class:`InvalidRequest`."""
    if data.thinking_budget is None:
        return data
    require_lenvm(model, "thinking_budget")
    if data.length_guidance is not None or data.custom_params is not None:
        message = "`thinking_budget` is one of several fields that set the length of the text; send one of them."
        raise InvalidRequest(message, param="thinking_budget")
    guidance = LengthGuidance(target_length=data.thinking_budget, applies_to="thinking")
    return msgspec.structs.replace(data, length_guidance=guidance)


def _max_tokens(data: ChatRequest) -> int | None:
    limit = data.max_tokens if data.max_completion_tokens is None else data.max_completion_tokens
    if limit == 0:
        raise InvalidRequest("`max_completion_tokens` is 0; ask for at least one token.", param="max_completion_tokens")
    return limit
