"""Server-sent events out, and clients that leave.

The first event is waited for before the answer begins, so an error before it is an answer with its own status. An error after it
is one last event, without ``[DONE]``. When the client leaves, what works for it is cancelled where it stands, down to the
connection to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from litestar.response.base import ASGIResponse, Response
from litestar.types import Receive, Send

from gateway.errors import ClientGone, GatewayError, InternalError

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def sse(chunk: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: %b\n\n" % _encoder.encode(chunk)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves, and raise :class:`ClientGone` from it. The request's body has been read before."""
    owner = asyncio.current_task()
    assert owner is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        owner.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        owner.uncancel()
        raise ClientGone("The client left before the answer was ready.") from None
    finally:
        watcher.cancel()


class EventStream(Response[Any]):
    """An answer of events. ``first`` is here already; ``rest`` is closed when the answer ends, however it ends."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._first = first
        self._rest = rest

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """What the web framework sends."""
        return _ASGIEventStream(self._first, self._rest, headers=self.headers)

    @classmethod
    async def primed(cls, events: AsyncGenerator[bytes, None], receive: Receive) -> EventStream:
        """Wait for the first event. Raises what ``events`` raises before it, and :class:`ClientGone`."""
        async with while_connected(receive):
            first = await anext(events)
        return cls(first, events)


class _ASGIEventStream(ASGIResponse):
    _should_set_content_length = False

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], *, headers: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream", headers=headers)
        self._first = first
        self._rest = rest

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Send everything, or as much as the client stays for."""
        try:
            async with aclosing(self._rest), while_connected(receive):
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for event in _with_error_event(self._rest):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass


async def _with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield event
    except GatewayError as error:
        yield sse(error.body)
    except Exception:
        logger.exception("a stream failed")
        yield sse(InternalError("Something failed inside the server.").body)
