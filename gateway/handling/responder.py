"""Runs the generation of a response and answers with its body, or with a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.errors import GatewayError
from gateway.generation.generation import Generation
from gateway.generation.sequence import Piece
from gateway.handling.chat_answer import ChatAnswer
from gateway.handling.generator import Generator, small, usage_of
from gateway.handling.streams import while_connected
from gateway.http.context import RequestContext
from gateway.output.parser import Content, Part
from gateway.process.time_slices import TimeSlice
from gateway.responses.draft import Draft
from gateway.responses.kept import Kept
from gateway.responses.output import Output
from gateway.schemas.response_body import ResponseBody
from gateway.schemas.response_events import Event, StateEvent
from gateway.text.prepared import Items

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Responder:
    """Creates the answers of ``/v1/responses``."""

    generator: Generator
    kept: Kept

    async def respond(self, request: Request[Any, Any, Any], run: ResponseRun) -> Response[Any]:
        """Charge the quota, run the generation and answer. Raises :class:`GatewayError` for failures before the first event."""
        generation = run.generation
        RequestContext.of(request).account.prompt_tokens = len(generation.request.prompt)
        lease = await self.generator.quotas.charge(request, tokens=generation.expected_tokens)
        events = self._events(request, run, lease)
        if run.streamed:
            return self.generator.streams.response(events, request, run.failed)
        async with while_connected(request.scope), aclosing(events):
            async for _ in events:
                pass
        return Response(run.body, media_type="application/json")

    async def _events(self, request: Request[Any, Any, Any], run: ResponseRun, lease: Any) -> AsyncGenerator[bytes, None]:
        """Yield the events, encoded if the response is streamed, and set ``run.body`` before the last one."""
        account = RequestContext.of(request).account
        opened = False
        with self.generator.counted([run.generation], lease, account):
            async with aclosing(run.generation.pieces(self.generator.dispatcher)) as batches:
                async for batch in batches:
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

    async def _finished(self, request: Request[Any, Any, Any], run: ResponseRun) -> bytes:
        """Store the response, if that was requested, and return its last event."""
        body = run.ended()
        run.body = _encoder.encode(body)
        await asyncio.sleep(0)
        if body.store and not await self.kept.keep(request, body.id, run.body, run.earlier, run.items, body.output):
            body.store = False
            run.body = _encoder.encode(body)
        encoded: Any = msgspec.Raw(run.body)
        return _event(run.last(body.status, encoded)) if run.streamed else b""


class ResponseRun:
    """One response being made."""

    def __init__(
        self,
        generation: Generation,
        draft: Draft,
        answer: ChatAnswer,
        *,
        streamed: bool,
        earlier: bytes,
        items: Items,
    ) -> None:
        """``answer``: converts log-probabilities. ``earlier``, ``items``: the conversation before, and the request's own items."""
        self.streamed = streamed
        self.generation = generation
        self.draft = draft
        self.earlier = earlier
        self.items = items
        self.body = b""
        """The body as JSON, once the response has ended."""
        self._answer = answer
        reasoning = draft.begun().reasoning
        self._output = Output(summary=(reasoning.summary or reasoning.generate_summary) is not None)
        self._finish = ""

    def opening(self) -> list[bytes]:
        """Return the events that begin the stream."""
        kinds = ("response.created", "response.in_progress")
        return self._encoded([self._state(kind, self.draft.begun()) for kind in kinds])

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
        """Return the body."""
        return self.draft.ended(self._output.items, usage_of([self.generation]), whole=self._finish != "length")

    def last(self, status: str, body: ResponseBody) -> StateEvent:
        """Return the event that ends the stream."""
        return self._state(f"response.{status}", body)

    def failed(self, error: GatewayError) -> bytes:
        """Return the event that ends a stream that breaks off."""
        body = self.draft.failed(error, self._output.items, usage_of([self.generation]))
        return _event(self.last(body.status, body))

    def _state(self, kind: Any, body: ResponseBody) -> StateEvent:
        return StateEvent(type=kind, sequence_number=self._output.number(), response=body)

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        encoded = [_event(event) if self.streamed else b"" for event in events]
        return encoded if self.streamed else []


def _event(event: Event) -> bytes:
    """Encode one event, with its name as the event's type."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encoder.encode(event))
