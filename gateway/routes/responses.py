"""``/v1/responses``: create, retrieve, list the input items of, and delete responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from litestar import Request, Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.cache.policy import CachePolicy
from gateway.errors import InvalidRequest
from gateway.generation.length import gamma_of_values, guidance_of, with_section
from gateway.generation.plan import check, plan
from gateway.handling.access import caller_of, priority_of, requested_model
from gateway.handling.body import Body, post_json
from gateway.handling.chat_answer import ChatAnswer
from gateway.handling.generator import system_fingerprint
from gateway.handling.openapi import READ_ERRORS, ApiOperation
from gateway.handling.reader import Reader
from gateway.handling.responder import Responder, ResponseRun
from gateway.pool.pool import Pool
from gateway.responses.draft import Draft
from gateway.responses.items import as_chat, renamed
from gateway.responses.kept import Kept
from gateway.schemas.chat import ChatMessage
from gateway.schemas.response_body import DeletedResponse, ItemList, ResponseBody
from gateway.schemas.responses import ResponseRequest
from gateway.text.prepared import as_list

PAGE_ITEMS = 20
MOST_PAGE_ITEMS = 100
PATH = "/v1/responses"
_STAND_IN = [ChatMessage("user")]
"""Messages of the chat request whose other fields the event loop checks; text workers read the messages."""


def response_routes(pool: Pool, reader: Reader, responder: Responder) -> list[HTTPRouteHandler]:
    """Create the routes."""
    return [_create_route(pool, reader, responder), *_stored_routes(responder.kept, responder)]


def _create_route(pool: Pool, reader: Reader, responder: Responder) -> HTTPRouteHandler:
    @post_json(PATH, ResponseRequest, "generation")
    async def create(request: Request[Any, Any, Any], data: JSONBody[Body[ResponseRequest]]) -> Response[ResponseBody]:
        """Answer a conversation of items.

        With `stream` the answer is a stream of typed server-sent events. The last one is `response.completed`,
        `response.incomplete` or `response.failed`, with the whole response.
        """
        async with reader.open(request, ResponseRequest, data) as body:
            fields = body.fields
            model = requested_model(request, pool, fields.model, falls_back=True)
            chat = as_chat(fields, _STAND_IN)
            logprobs = (fields.top_logprobs or 0) if fields.includes_logprobs else None
            with _renamed():
                _check(fields)
                check(model, chat, logprobs=logprobs)
                guidance = guidance_of(model, chat, logprobs=logprobs)
            priority = priority_of(request, fields.priority)
            if fields.store:
                if not CachePolicy.of(request).write:
                    raise InvalidRequest("`store` contradicts `Cache-Control: no-store`; send one of them.", param="store")
                await responder.kept.check()
            earlier = b""
            if fields.previous_response_id is not None:
                stored = await responder.kept.find(request, fields.previous_response_id, param="previous_response_id")
                earlier = stored.context
            prepared = await body.read(model, earlier)
        guidance = with_section(guidance, prepared.format)
        instructions = bytes(prepared.response)
        if fields.store:
            responder.kept.check_size(instructions, earlier, prepared.items)
        with _renamed():
            generation = plan(
                model,
                chat,
                as_list(prepared.rows[0]),
                max_tokens=fields.max_output_tokens,
                logprobs=logprobs,
                guidance=guidance,
                grammar=prepared.grammar,
                bad_words=prepared.bad_words,
                format=prepared.format,
                param="input",
                priority=priority,
                caller=caller_of(request, cache_salt=fields.cache_salt),
            )
        draft = Draft(fields, model, system_fingerprint(model), instructions)
        answer = ChatAnswer(model, chat, None, gamma=gamma_of_values(model, guidance))
        run = ResponseRun(generation, draft, answer, streamed=bool(fields.stream), earlier=earlier, items=prepared.items)
        response = await responder.respond(request, run)
        if prepared.truncated:
            response.headers["x-yardstick-truncated"] = str(len(prepared.truncated))
        return response

    return create


def _check(fields: ResponseRequest) -> None:
    if fields.top_logprobs and not fields.includes_logprobs:
        message = '`top_logprobs` needs `include`: `["message.output_text.logprobs"]`.'
        raise InvalidRequest(message, param="top_logprobs")


@contextmanager
def _renamed() -> Iterator[None]:
    """Name the fields of this endpoint in errors of chat requests."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error) from None


def _stored_routes(kept: Kept, responder: Responder) -> list[HTTPRouteHandler]:
    quotas = responder.generator.quotas

    @get(f"{PATH}/{{id:str}}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["generation"])
    async def retrieve(
        request: Request[Any, Any, Any],
        id: FromPath[str],
        stream: FromQuery[str] = "false",
    ) -> Response[ResponseBody]:
        """Return a stored response. `stream` is not supported, because a stored response is complete."""
        if stream.lower() not in ("false", "0", ""):
            raise InvalidRequest("A stored response is not streamed; leave `stream` out.", param="stream")
        await quotas.charge(request, tokens=0)
        stored = await kept.find(request, id)
        return Response(stored.response, media_type="application/json")  # type: ignore[arg-type]

    @get(f"{PATH}/{{id:str}}/input_items", responses=READ_ERRORS, operation_class=ApiOperation, tags=["generation"])
    async def list_input_items(
        request: Request[Any, Any, Any],
        id: FromPath[str],
        limit: FromQuery[str] = str(PAGE_ITEMS),
        order: FromQuery[str] = "desc",
        after: FromQuery[str | None] = None,
    ) -> ItemList:
        """List the items of the `input` that a stored response answers, the last one first unless `order` is `asc`; at most `limit`
        (1 to 100), from the one behind the item `after` on."""
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_PAGE_ITEMS):
            raise InvalidRequest(f"`limit` is a number from 1 to {MOST_PAGE_ITEMS}.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("`order` is `asc` or `desc`.", param="order")
        await quotas.charge(request, tokens=0)
        items = (await kept.find(request, id)).input
        places = range(len(items.ids)) if order == "asc" else range(len(items.ids))[::-1]
        begin = 0
        if after is not None:
            if after not in items.ids:
                raise InvalidRequest("`after` is not the id of an item of this response.", param="after")
            begin = places.index(items.ids.index(after)) + 1
        page = places[begin : begin + int(limit)]
        data: list[Any] = [msgspec.Raw(items.at(place)) for place in page]
        return ItemList(
            data=data,
            first_id=items.ids[page[0]] if page else None,
            last_id=items.ids[page[-1]] if page else None,
            has_more=begin + int(limit) < len(places),
        )

    @delete(f"{PATH}/{{id:str}}", status_code=200, responses=READ_ERRORS, operation_class=ApiOperation, tags=["generation"])
    async def remove(request: Request[Any, Any, Any], id: FromPath[str]) -> DeletedResponse:
        """Delete a stored response. Responses that continue it keep the conversation."""
        await quotas.charge(request, tokens=0)
        await kept.remove(request, id)
        return DeletedResponse(id=id)

    return [retrieve, list_input_items, remove]
