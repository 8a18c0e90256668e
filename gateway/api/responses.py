"""``/v1/responses``: routes, answers and stored conversations.

When the bound on entries is reached, the key with most responses loses its oldest ones first, and when that on bytes is reached,
the key with most bytes. So no key can displace the responses of one that stores less.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from yardstick_llm.gateway.api.access import caller_of, priority_of, requested_model
from yardstick_llm.gateway.api.answers import EventStream, while_connected
from yardstick_llm.gateway.api.chat import ChatAnswer, with_budget
from yardstick_llm.gateway.api.generation import Generator, show_forecast, small, system_fingerprint, usage_of
from yardstick_llm.gateway.api.openapi import READ_ERRORS, ApiOperation
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.api.response_output import Output
from yardstick_llm.gateway.errors import GatewayError, InvalidRequest, ResponseNotFound, StoreUnavailable
from yardstick_llm.gateway.generation.generation import Generation
from yardstick_llm.gateway.generation.length import gamma_of_values, guidance_of, with_section
from yardstick_llm.gateway.generation.plan import check, plan
from yardstick_llm.gateway.generation.sequence import Piece
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest, CachePolicy, RequestContext
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.output.parser import Content, Part
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.requests.responses import as_chat, full_name, renamed, tools_of
from yardstick_llm.gateway.schemas.chat import ChatMessage
from yardstick_llm.gateway.schemas.common import Usage, new_id
from yardstick_llm.gateway.schemas.responses import (
    DeletedResponse,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    ItemList,
    OutputItem,
    OutputMessage,
    OutputTokensDetails,
    Reasoning,
    ResponseBody,
    ResponseError,
    ResponseRequest,
    ResponseUsage,
    StateEvent,
    TextConfig,
    TextFormat,
)
from yardstick_llm.gateway.settings import Settings
from yardstick_llm.gateway.store.base import Full, Missing, Space, Store, Unavailable
from yardstick_llm.gateway.text.prepared import Items


def usage_of_response(usage: Usage) -> ResponseUsage:
    """Convert token counts."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    reasoning = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else 0
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached),
        output_tokens=usage.completion_tokens or 0,
        output_tokens_details=OutputTokensDetails(reasoning),
        total_tokens=usage.total_tokens,
    )


STORED_RESPONSES = 10_000
"""Most stored responses; beyond it, the oldest of the API key with most responses are removed."""
ENTRY_BYTES = 1024
"""Bytes that a response takes besides its contents."""
_ID = re.compile(r"resp_[0-9a-f]{32}")


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A stored response."""

    response: bytes
    """The response's body as JSON."""
    context: bytes
    """The items of the conversation up to this response, with its own: JSON values with commas between them."""
    input: Items
    """The items of the request."""


_decoder = msgspec.msgpack.Decoder(Stored)


def response_space(settings: Settings) -> Space:
    """Return the bounds of stored responses."""
    return Space(
        name="responses",
        bytes=settings.stored_responses_bytes,
        entries=STORED_RESPONSES if settings.stored_responses_bytes else 0,
        entry_bytes=ENTRY_BYTES,
        seconds=settings.stored_responses_seconds,
        evicts=True,
    )


@dataclass(frozen=True)
class Kept:
    """The stored responses of all API keys."""

    store: Store
    space: Space
    telemetry: Telemetry
    most_bytes: int
    """Most bytes of the conversation before a response that is stored."""

    async def check(self) -> None:
        """Raise :class:`InvalidRequest` if the server stores no responses, :class:`StoreUnavailable` if it cannot at present."""
        if not self.space.entries:
            raise InvalidRequest(
                "This server stores no responses; send `store` as false, and the whole conversation.", param="store"
            )
        with _errors():
            await self.store.check()

    def check_size(self, instructions: bytes, earlier: bytes, items: Items) -> None:
        """Raise :class:`InvalidRequest` if a conversation is too long to be stored."""
        size = len(instructions) + len(earlier) + len(items.content)
        if size > self.most_bytes:
            message = f"A conversation of {size} bytes cannot be stored; at most {self.most_bytes} can. Send `store` as false."
            raise InvalidRequest(message, param="store")

    async def find(self, request: AnyRequest, id: str, *, param: str | None = None) -> Stored:
        """Return a response of the client's key. Raises :class:`ResponseNotFound`, :class:`StoreUnavailable`."""
        value = None
        if _ID.fullmatch(id):
            with _errors():
                (value,) = (await self.store.get(self.space, _owner(request), [id])).values
        if value is None:
            raise _unknown(id, param)
        return _decoder.decode(value)

    async def remove(self, request: AnyRequest, id: str) -> None:
        """Remove a response of the client's key. Raises as :meth:`find`."""
        removed = 0
        if _ID.fullmatch(id):
            with _errors():
                removed = await self.store.remove(self.space, _owner(request), [id])
        if not removed:
            raise _unknown(id, None)

    async def keep(self, request: AnyRequest, id: str, body: bytes, earlier: bytes, items: Items, output: list[OutputItem]) -> bool:
        """Store a response whose body is ``body``. Return whether it is stored."""
        encoded = [_encoder.encode(_plain(item)) for item in output]
        context = b",".join([part for part in (earlier, items.content, *encoded) if part])
        value = msgspec.msgpack.encode(Stored(body, context, items))
        try:
            await self.store.put(self.space, _owner(request), [(id, value)])
            stored = True
        except (Unavailable, Full):
            stored = False
        self.telemetry.stored_responses.labels("stored" if stored else "dropped").inc()
        return stored


def _plain(item: OutputItem) -> OutputItem:
    """Return ``item`` as the input of a later request: without log-probabilities."""
    if not isinstance(item, OutputMessage):
        return item
    content: list[Any] = [msgspec.structs.replace(part, logprobs=[]) for part in item.content]
    return msgspec.structs.replace(item, content=content)


def _owner(request: AnyRequest) -> str:
    """Return the owner of a client's responses: its API key. Without keys there is one owner."""
    key = RequestContext.of(request).key
    return "" if key is None else key.id


def _unknown(id: str, param: str | None) -> ResponseNotFound:
    message = f"The response {id[:64]!r} is not stored here: it was not stored, has expired, was deleted, or is another key's."
    return ResponseNotFound(message, param=param)


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of the store. An owner without responses is no error. Raises :class:`StoreUnavailable`."""
    try:
        yield
    except Missing:
        pass
    except Unavailable:
        message = "Responses cannot be stored or read at present; try again, or send the whole conversation without `store`."
        raise StoreUnavailable(message, retry_after=1) from None


_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Responder:
    """Creates the answers of ``/v1/responses``."""

    generator: Generator
    kept: Kept

    async def respond(self, request: AnyRequest, run: ResponseRun) -> Response[Any]:
        """Charge the quota, run the generation and answer. Raises :class:`GatewayError` for failures before the first event."""
        generation = run.generation
        RequestContext.of(request).account.prompt_tokens = len(generation.request.prompt)
        lease = await self.generator.quotas.charge(request, tokens=generation.expected_tokens)
        events = self._events(request, run, lease)
        if run.streamed:
            return EventStream(events, request, self.generator.keepalive_seconds, run.failed)
        async with while_connected(request.scope), aclosing(events):
            async for _ in events:
                pass
        return Response(run.encoded, media_type="application/json")

    async def _events(self, request: AnyRequest, run: ResponseRun, lease: Any) -> AsyncGenerator[bytes, None]:
        """Yield the events, encoded if the response is streamed, and set ``run.encoded`` before the last one."""
        account = RequestContext.of(request).account
        opened = False
        with self.generator.counted([run.generation], lease, account):
            async with aclosing(run.generation.pieces(self.generator.dispatcher)) as batches:
                async for batch in batches:
                    if not opened:
                        show_forecast(request, [run.generation])
                    chunks = [] if opened else run.opening()
                    opened, time_slice = True, TimeSlice()
                    for piece in small(batch):
                        chunks += run.push(piece)
                        if time_slice.over:
                            yield b"".join(chunks)
                            chunks = []
                            await time_slice.yield_to_loop()
                    if chunks:
                        yield b"".join(chunks)
        for event in run.closing():  # with log-probabilities, each repeats megabytes
            yield event
            await asyncio.sleep(0)
        yield await self._finished(request, run)

    async def _finished(self, request: AnyRequest, run: ResponseRun) -> bytes:
        """Store the response, if that was requested, and return its last event."""
        body = run.ended()
        run.encoded = _encoder.encode(body)
        await asyncio.sleep(0)
        if body.store and not await self.kept.keep(request, body.id, run.encoded, run.earlier, run.items, body.output):
            body.store = False
            run.encoded = _encoder.encode(body)
        encoded: Any = msgspec.Raw(run.encoded)
        return _event(run.state(body.status, encoded)) if run.streamed else b""


class ResponseRun:
    """One response being made. Its body repeats the parameters of the request."""

    def __init__(
        self,
        fields: ResponseRequest,
        generation: Generation,
        answer: ChatAnswer,
        *,
        instructions: bytes,
        earlier: bytes,
        items: Items,
    ) -> None:
        """``answer``: converts log-probabilities. ``instructions``: as JSON. ``earlier``: the conversation before. ``items``: the
        request's own items."""
        self.streamed = bool(fields.stream)
        self.generation = generation
        self.earlier = earlier
        self.items = items
        self.encoded = b""
        """The body as JSON, once the response has ended."""
        self._answer = answer
        text, reasoning = fields.text or TextConfig(), fields.reasoning or Reasoning()
        encoded: Any = msgspec.Raw(instructions)
        self._begun = ResponseBody(
            id=f"resp_{new_id()}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=encoded,
            max_output_tokens=fields.max_output_tokens,
            model=generation.model.name,
            output=[],
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            reasoning=reasoning,
            store=bool(fields.store),
            temperature=1.0 if fields.temperature is None else fields.temperature,
            text=TextConfig(text.format or TextFormat(), text.verbosity or "medium"),
            tool_choice=fields.tool_choice or "auto",
            tools=fields.tools or [],
            top_logprobs=fields.top_logprobs or 0,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            truncation=fields.truncation or "disabled",
            user=fields.user,
            metadata=fields.metadata or {},
            system_fingerprint=system_fingerprint(generation.model),
        )
        names = {full_name(space, tool.name): (space, tool.name) for _, space, tool in tools_of(fields.tools) if space}
        self._output = Output(summary=(reasoning.summary or reasoning.generate_summary) is not None, names=names)
        self._finish = ""

    def opening(self) -> list[bytes]:
        """Return the events that begin the stream."""
        return self._encoded([self.state(state, self._begun) for state in ("created", "in_progress")])

    def push(self, piece: Piece) -> list[bytes]:
        """Return the events of one piece."""
        self._finish = piece.finish or self._finish
        logprobs = self._answer.logprobs(piece.tokens)
        text: list[Part] = [Content(piece.text)] if piece.text else []
        parts = text if piece.parts is None else piece.parts
        offsets = [0 if piece.parts is None else token.offset for token in piece.tokens]
        return self._encoded(self._output.push(parts, zip(offsets, logprobs.content, strict=True) if logprobs else ()))

    def closing(self) -> Iterator[bytes]:
        """Yield the events that complete the output."""
        for event in self._output.finish("incomplete" if self._finish == "length" else "completed"):
            yield _event(event) if self.streamed else b""

    def ended(self) -> ResponseBody:
        """Return the body. A response that did not end by itself, but at a limit, is incomplete."""
        whole = self._finish != "length"
        return self._body(
            status="completed" if whole else "incomplete",
            completed_at=int(time.time()) if whole else None,
            incomplete_details=None if whole else IncompleteDetails(),
        )

    def failed(self, error: GatewayError) -> bytes:
        """Return the event that ends a stream that breaks off. The response is not stored."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = self._body(status="failed", error=ResponseError(code, error.message), store=False)
        return _event(self.state(body.status, body))

    def _body(self, **ending: Any) -> ResponseBody:
        usage = usage_of_response(usage_of([self.generation]))
        return msgspec.structs.replace(self._begun, output=self._output.items, usage=usage, **ending)

    def state(self, state: str, body: ResponseBody) -> StateEvent:
        """Return an event with the whole response: at its beginning, or at its end."""
        kind: Any = f"response.{state}"
        return StateEvent(type=kind, sequence_number=self._output.number(), response=body)

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        encoded = [_event(event) if self.streamed else b"" for event in events]
        return encoded if self.streamed else []


def _event(event: Event) -> bytes:
    """Encode one event, with its name as the event's type."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encoder.encode(event))


PAGE_ITEMS = 20
MOST_PAGE_ITEMS = 100
PATH = "/v1/responses"
_STAND_IN = [ChatMessage("user")]
"""Messages of the chat request whose other fields the event loop checks; text workers read the messages."""


def response_routes(pool: Pool, reader: Reader, responder: Responder) -> list[HTTPRouteHandler]:
    """Create the routes."""
    return [_create_route(pool, reader, responder), *_stored_routes(responder.kept, responder)]


def _create_route(pool: Pool, reader: Reader, responder: Responder) -> HTTPRouteHandler:
    @post_json(PATH, "generation")
    async def create(request: AnyRequest, data: JSONBody[Body[ResponseRequest]]) -> Response[ResponseBody]:
        """Answer a conversation of items.

        With `stream` the answer is a stream of typed server-sent events. The last one is `response.completed`,
        `response.incomplete` or `response.failed`, with the whole response.
        """
        body = await reader.body(request, ResponseRequest, data)
        fields = body.fields
        model = requested_model(request, pool, fields.model, falls_back=True)
        chat = as_chat(fields, _STAND_IN)
        logprobs = (fields.top_logprobs or 0) if fields.includes_logprobs else None
        with _renamed():
            if fields.top_logprobs and not fields.includes_logprobs:
                message = '`top_logprobs` needs `include`: `["message.output_text.logprobs"]`.'
                raise InvalidRequest(message, param="top_logprobs")
            check(model, chat, logprobs=logprobs)
            guidance = guidance_of(model, with_budget(model, chat), logprobs=logprobs)
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
                prepared,
                max_tokens=fields.max_output_tokens,
                logprobs=logprobs,
                guidance=guidance,
                priority=priority,
                caller=caller_of(request, cache_salt=fields.cache_salt),
            )
        answer = ChatAnswer(model, chat, None, gamma=gamma_of_values(model, guidance))
        run = ResponseRun(fields, generation, answer, instructions=instructions, earlier=earlier, items=prepared.items)
        response = await responder.respond(request, run)
        if prepared.truncated:
            response.headers["x-yardstick-truncated"] = str(len(prepared.truncated))
        return response

    return create


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
    async def retrieve(request: AnyRequest, id: FromPath[str], stream: FromQuery[str] = "false") -> Response[ResponseBody]:
        """Return a stored response. `stream` is not supported, because a stored response is complete."""
        if stream.lower() not in ("false", "0", ""):
            raise InvalidRequest("A stored response is not streamed; leave `stream` out.", param="stream")
        await quotas.charge(request, tokens=0)
        stored = await kept.find(request, id)
        return Response(stored.response, media_type="application/json")  # type: ignore[arg-type]

    @get(f"{PATH}/{{id:str}}/input_items", responses=READ_ERRORS, operation_class=ApiOperation, tags=["generation"])
    async def list_input_items(
        request: AnyRequest,
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
    async def remove(request: AnyRequest, id: FromPath[str]) -> DeletedResponse:
        """Delete a stored response. Responses that continue it keep the conversation."""
        await quotas.charge(request, tokens=0)
        await kept.remove(request, id)
        return DeletedResponse(id=id)

    return [retrieve, list_input_items, remove]
