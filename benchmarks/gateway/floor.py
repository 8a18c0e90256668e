"""The lower bound of a gateway's cost, for the benchmark: a server with one hop to an engine.

Run it with ``python -m benchmarks.gateway.floor --help``.

uvicorn with the gateway's protocol, and an ASGI application that decodes a score request, sends it to an engine as one msgpack
message, decodes the answer and encodes it as JSON; or that streams a chat, one event with a constant text for each token. No
routing, keys, cache, limits, metrics, tokens or log.
"""

from __future__ import annotations

import argparse
import uuid
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import aiohttp
import msgspec
import uvicorn

from benchmarks.gateway.programs import read_body
from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.answers import DONE
from yardstick_llm.gateway.http.connection import BoundedConnection, Connections
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.requests.score import ScoreRequest
from yardstick_llm.gateway.schemas.chat import ChatRequest
from yardstick_llm.gateway.settings import Settings

_request = msgspec.json.Decoder(ScoreRequest)
_chat = msgspec.json.Decoder(ChatRequest)
_scored = msgspec.msgpack.Decoder(wire.Scored)
_json = msgspec.json.Encoder()


class Floor:
    """The ASGI application."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["path"] == "/v1/chat/completions":
            await self._stream(await read_body(receive), send)
        elif scope["type"] == "http":
            body = b"ok" if scope["method"] == "GET" else await self._score(receive)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
            await send({"type": "http.response.body", "body": body})

    async def _score(self, receive: Any) -> bytes:
        asked = _request.decode(await read_body(receive))
        score = wire.Score(uuid.uuid4().hex, asked.query, asked.items, wire.Labels(asked.label_token_ids))  # type: ignore[arg-type]
        async with self._posted("score", score) as response:
            return _json.encode({"scores": _scored.decode(await response.read()).rows})

    async def _stream(self, body: bytes, send: Any) -> None:
        asked = _chat.decode(body)
        sampling = wire.Sampling(max_tokens=asked.max_tokens or 1)
        generate = wire.Generate(uuid.uuid4().hex, [5], sampling, logprobs=asked.top_logprobs if asked.logprobs else None)
        reader = wire.FrameReader()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async with self._posted("generate", generate) as response:
            while chunk := await response.content.readany():
                events = [_json.encode(_event(reply)) for reply in reader.feed(chunk) if isinstance(reply, wire.Delta)]
                content = b"".join(b"data: %b\n\n" % event for event in events)
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    def _posted(self, path: str, message: wire.Score | wire.Generate) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session.post(f"{self._engine}/{path}", data=wire.encode(message))


def _event(delta: wire.Delta) -> dict[str, Any]:
    choice = {"index": delta.index, "delta": {"content": " token"}, "logprobs": delta.logprobs, "finish_reason": delta.finish}
    return {"id": delta.id, "object": "chat.completion.chunk", "created": 0, "model": "fake", "choices": [choice]}


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.floor", description="The least that a gateway can be.")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    config = uvicorn.Config(
        Floor(options.engine),
        loop="uvloop",
        http=partial(BoundedConnection, Connections(Settings(engines=(options.engine,)), Telemetry(), None)),  # type: ignore[arg-type]
        lifespan="off",
        access_log=False,
        log_level="error",
        port=options.port,
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
