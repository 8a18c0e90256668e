"""The gateway's own HTTP/1.1 connections to an engine.

A general HTTP client spends more on a message of a few bytes than the rest of the gateway: timers, chunk lists and several calls
for each. :class:`EngineStream` decodes messages where they arrive, and wakes the reader once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import cache

import httptools
import msgspec
from yarl import URL

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, EngineSilent, NotReady

MAX_UNREAD = 128 * 1024
"""Bytes that arrive before reading pauses, while a decoded message waits to be read."""
MAX_MESSAGE = 512 * 1024
"""Most bytes of a message of a stream. It is decoded at once; a message of this size takes 4 ms. An engine's largest message, the
log-probabilities of 256 tokens of a prompt with twenty for each, has 71 KB and takes 0.2 ms."""
MAX_REFUSAL = 64 * 1024
"""Bytes that are kept of the body of a refusal."""
MAX_OVERHEAD = 128 * 1024
"""Bytes of an answer that is one message, without its content and the content's frames: its head, and the body of a refusal."""
KEEPALIVE_SECONDS = 2.0
"""Idle connections close before the engine's server closes them (5 s in uvicorn), so that no request uses a closed connection."""

OnDelta = Callable[[wire.Delta], bool]
"""Processes one delta at once, from the event of the connection that brought it. Returns False, and changes nothing, if the reader
should get it."""


def unreadable() -> EngineLost:
    """Create the error for an answer that is not valid."""
    return EngineLost("The engine's answer cannot be read; its version may not match the gateway's.")


class EngineStream(asyncio.Protocol):
    """A connection, and the answer to the latest request on it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader = wire.FrameReader(MAX_MESSAGE)
        self._replies: list[wire.Reply] = []
        self._whole: bytearray | None = None
        """The body of an answer that is one message; None for an answer in frames."""
        self._unread = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_delta: OnDelta | None = None
        """Gets deltas that arrive alone while the reader waits."""
        self._error: Exception | None = None
        self._complete = True
        self._silence_seconds = 0.0
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.status = 0
        """Status of the answer; 0 until its head has arrived."""
        self.headers: dict[bytes, bytes] = {}
        """Headers of the answer, by name in lower case."""
        self.refusal = b""
        """The body of an answer whose status is not 200."""
        self._received = 0

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        open = self._transport is not None and not self._transport.is_closing()
        return open and self._complete and self._error is None and not self._paused

    def send(self, request: bytes, silence_seconds: float, *, framed: bool = True) -> None:
        """Send a request. It fails with :class:`EngineSilent` after ``silence_seconds`` in which nothing arrives. ``framed``: the
        answer is read with :meth:`read`; otherwise with :meth:`read_whole`."""
        assert self._transport is not None
        self._replies, self._unread = [], 0  # the reader of the request before may have left some
        self._whole = None if framed else bytearray()
        self._reader, self._complete, self.status, self.refusal = wire.FrameReader(MAX_MESSAGE), False, 0, b""
        self.headers, self._received = {}, 0
        self._silence_seconds, self._heard = silence_seconds, self._loop.time()
        self._transport.write(request)
        self._look()

    async def read(self, on_delta: OnDelta | None = None) -> list[wire.Reply]:
        """Return the messages that have arrived, at least one; an empty list at the end. Deltas that ``on_delta`` processes are
        left out. Raises :class:`GatewayError`, and what ``on_delta`` raises."""
        if not self._replies and not self._complete and self._error is None:
            self._waiter, self._on_delta = self._loop.create_future(), on_delta
            try:
                await self._waiter
            finally:
                self._waiter = self._on_delta = None
        replies, self._replies, self._unread = self._replies, [], 0
        if self._paused:
            self._regulate()
        if not replies and self._error is not None:
            raise self._error
        return replies

    async def read_whole(self) -> bytes | bytearray:
        """Return the body of the answer, whatever its status. Raises :class:`GatewayError`."""
        assert self._whole is not None
        while not self._complete and self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        return self._whole if self.status == 200 else self.refusal

    def close(self) -> None:
        """Close the connection, which aborts a request in progress."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def retire_after(self, seconds: float, retire: Callable[[], None]) -> None:
        """Call ``retire`` after ``seconds``, unless another request is sent or :meth:`close` is called."""
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, retire)

    # --- events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start."""
        self._transport = transport

    def data_received(self, data: bytes | memoryview) -> None:
        """Decode the messages in ``data``."""
        self._heard = self._loop.time()
        if self._transport is None:
            return
        if self._complete:  # bytes without a request
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError):
            self._fail(unreadable())
            return
        if self._on_delta is not None and len(replies := self._replies) == 1:
            delta = replies[0]
            if isinstance(delta, wire.Delta) and not (self._complete or self._paused or self._error):
                try:  # without waking the reader, which would cost more than the rest of the work
                    if self._on_delta(delta):
                        replies.clear()
                        return
                except Exception as error:  # the reader raises it
                    replies.clear()
                    self._fail(error)
                    return
        if self._whole is not None and not self._complete:
            self._received += len(data)
            if self._received > MAX_OVERHEAD + 2 * len(self._whole):
                self._fail(unreadable())
                return
        self._unread += len(data)
        if self._paused or self._unread > MAX_UNREAD:
            self._regulate()
        if self._replies or self._complete:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End the request in progress."""
        self._transport = None
        if self.status not in (0, 200):  # the end of the connection may be the end of the body
            self._complete = True
        if not self._complete:
            self._fail(EngineLost("The connection to the engine broke; try again.", retryable=True))
        self._wake()

    # --- events of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers, which follow the content, are ignored."""
        if self.status == 0:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Decode messages, or keep the reason of a refusal."""
        if self.status != 200:
            if len(self.refusal) < MAX_REFUSAL:
                self.refusal += body
        elif self._whole is None:
            self._replies += self._reader.feed(body)
        else:
            self._whole += body
            if len(self._whole) > wire.MAX_FRAME:
                self._fail(unreadable())

    def on_message_complete(self) -> None:
        """End the answer."""
        self._complete = True
        if self._reader.pending:
            self._fail(EngineLost("The engine broke off in the middle of a message.", retryable=True))
        elif not self._parser.should_keep_alive():
            self.close()

    def _regulate(self) -> None:
        """Pause or resume reading."""
        full = bool(self._replies) and self._unread > MAX_UNREAD
        if full == self._paused or self._transport is None:
            return
        self._paused, self._heard = full, self._loop.time()
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and (self._replies or self._complete or self._error):
            self._waiter.set_result(None)

    def _look(self) -> None:
        """End a silent request. One timer compares the time of the last bytes, so that a message starts no timer."""
        self._stop_timer()
        now = self._loop.time()
        due = (now if self._paused else self._heard) + self._silence_seconds
        if self._complete:
            return
        if due <= now:
            self._fail(EngineSilent("The engine was silent for too long; try again, or ask for less at once."))
        else:
            self._timer = self._loop.call_at(due, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@cache
def _tls() -> ssl.SSLContext:
    """The authorities that sign certificates of engines. All clients share them, because reading them takes 30 ms."""
    return ssl.create_default_context()


class Connections:
    """The connections to one engine, of which idle ones are used again. Admission bounds the number of requests, and so of
    these."""

    def __init__(self, url: URL, *, connect_seconds: float, keepalive_seconds: float = KEEPALIVE_SECONDS) -> None:
        self._url = url
        self._connect_seconds = connect_seconds
        self._keepalive_seconds = keepalive_seconds
        self.idle: list[EngineStream] = []

    async def take(self) -> EngineStream:
        """Return the idle connection that was used last, or a new one. Raises :class:`NotReady`."""
        while self.idle:
            if (stream := self.idle.pop()).reusable:
                return stream
            stream.close()
        host, port = self._url.host or "", self._url.port or 0
        tls = _tls() if self._url.scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, stream = await asyncio.get_running_loop().create_connection(EngineStream, host, port, ssl=tls)
        except (OSError, TimeoutError):
            raise NotReady("The model's engine cannot be reached; try again soon.", retry_after=1, retryable=True) from None
        return stream

    def give_back(self, stream: EngineStream) -> None:
        """Keep a connection for the next request. It is closed, which aborts the request, if the answer is incomplete."""
        if stream.reusable:
            self.idle.append(stream)
            stream.retire_after(self._keepalive_seconds, lambda: self._retire(stream))
        else:
            stream.close()

    def _retire(self, stream: EngineStream) -> None:
        self.idle.remove(stream)
        stream.close()

    def close(self) -> None:
        """Close idle connections."""
        while self.idle:
            self.idle.pop().close()
