"""The gateway's own connection to an engine, and the client above it, against raw servers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from yarl import URL

from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, EngineSilent, GatewayError, NotReady
from yardstick_llm.gateway.generation.plan import WHOLE_TOKENS
from yardstick_llm.gateway.pool.client import EngineClient, EngineToken, Readiness
from yardstick_llm.gateway.pool.connection import MAX_MESSAGE, MAX_OVERHEAD, MAX_UNREAD, Connections, EngineStream
from yardstick_llm.gateway.schemas.generation import MAX_LOGPROBS

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
Serve = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def delta(offset: int, tokens: int = 1) -> wire.Delta:
    return wire.Delta("x", offset, [7] * tokens)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """Reads requests and answers each by ``serve``."""

    def __init__(self, serve: Serve, body: bytes) -> None:
        self._serve = serve
        self._body = body
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.sent = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                self.requests.append(await reader.readuntil(b"\r\n\r\n" + self._body))
                await self._serve(self, reader, writer)
        writer.close()
        self.closed += 1


@asynccontextmanager
async def serving(serve: Serve, body: bytes = b"body") -> AsyncIterator[tuple[Server, URL]]:
    server = Server(serve, body)
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listener:
        yield server, URL(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/generate")
        for writer in server.writers:
            writer.transport.abort()
        await until(lambda: server.closed == server.connections)


class Streams:
    """Connections to one server at a time."""

    def __init__(self) -> None:
        self.connections: Connections | None = None

    @property
    def idle(self) -> list[EngineStream]:
        return [] if self.connections is None else self.connections.idle


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    streams = Streams()
    yield streams
    if streams.connections is not None:
        streams.connections.close()


@asynccontextmanager
async def post(streams: Streams, url: URL, seconds: float = 5, *, framed: bool = True) -> AsyncIterator[EngineStream]:
    connections = streams.connections = streams.connections or Connections(url, connect_seconds=1, keepalive_seconds=0.3)
    stream = await connections.take()
    try:
        stream.send(b"POST /generate HTTP/1.1\r\ncontent-length: 4\r\n\r\nbody", seconds, framed=framed)
        yield stream
    finally:
        connections.give_back(stream)


async def read_all(stream: EngineStream, take: Callable[[wire.Delta], bool] | None = None) -> list[wire.Reply]:
    found: list[wire.Reply] = []
    while replies := await stream.read(take):
        found += replies
    return found


def answers(*parts: bytes) -> Serve:
    """Send ``parts`` with a pause between them."""

    async def serve(_: Server, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)

    return serve


async def test_an_answer_that_nobody_read_is_not_the_answer_to_the_next_request(streams: Streams) -> None:
    """A reader may leave when the whole answer has arrived: its connection is used again."""

    async def serve(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = len(server.requests) == 1
        messages = [delta(0), delta(1)] if first else [delta(5)]
        writer.write(HEAD + b"".join(chunk(wire.pack_frame(message)) for message in messages) + END)

    async with serving(serve) as (server, url):
        async with post(streams, url) as stream:
            await until(lambda: stream.reusable)
        async with post(streams, url) as stream:
            assert await stream.read() == [delta(5)]
        assert server.connections == 1


async def test_one_connection_serves_requests_one_after_another(streams: Streams) -> None:
    frames = wire.pack_frame(delta(0)) + wire.pack_frame(delta(1, 1000))
    parts = [chunk(frames[begin : begin + 99]) for begin in range(0, len(frames), 99)]
    async with serving(answers(HEAD, *parts, END)) as (server, url):
        for _ in range(3):
            async with post(streams, url) as stream:
                assert await read_all(stream) == [delta(0), delta(1, 1000)]
        assert (server.connections, len(server.requests)) == (1, 3)
        await until(lambda: server.closed == 1)
        assert not streams.idle, "an idle connection is closed and forgotten"
        async with post(streams, url) as stream:
            assert len(await read_all(stream)) == 2
        assert server.connections == 2


async def test_leaving_closes_the_connection(streams: Streams) -> None:
    async def serve(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(wire.pack_frame(delta(0))))
        assert await reader.read() == b""

    async with serving(serve) as (server, url):
        async with post(streams, url) as stream:
            assert await stream.read() == [delta(0)]
        await until(lambda: server.closed == 1)


@pytest.mark.slow
async def test_a_reader_that_is_slow_stops_the_engine(streams: Streams) -> None:
    frame = chunk(wire.pack_frame(delta(0, 10_000)))
    count = 4000  # 40 MB, more than the kernel's buffers hold

    async def serve(server: Server, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(count):
            writer.write(frame)
            await writer.drain()
            server.sent += 1
        writer.write(END)

    async with serving(serve) as (server, url), post(streams, url, seconds=0.5) as stream:
        await asyncio.sleep(1.5)  # longer than the limit of silence, which does not count while nobody reads
        assert stream._unread < MAX_UNREAD + 1024 * 1024
        assert server.sent < count
        assert len(await read_all(stream)) == count


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + chunk(wire.pack_frame(delta(0))) + b"3\r\nab"])
async def test_silence_ends_the_request(streams: Streams, begun: bytes) -> None:
    async def serve(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await reader.read()

    async with serving(serve) as (server, url):
        with pytest.raises(EngineSilent):
            async with post(streams, url, seconds=0.2) as stream:
                await read_all(stream)
        await until(lambda: server.closed == 1)


@pytest.mark.parametrize(
    ("answer", "replies", "retryable"),
    [
        (b"", 0, True),
        (HEAD, 0, True),
        (HEAD + chunk(wire.pack_frame(delta(0))), 1, True),
        (HEAD + chunk(wire.pack_frame(delta(0)) + b"\x05\0\0\0ab") + END, 1, True),
        (HEAD + chunk(wire.pack_frame(delta(0))) + b"no chunk", 1, False),
        (HEAD + chunk(b"\x02\0\0\0\xc1\xc1"), 0, False),
        (HEAD + chunk((MAX_MESSAGE + 1).to_bytes(4, "little")), 0, False),
        (b"SSH-2.0-OpenSSH\r\n", 0, False),
    ],
)
async def test_a_broken_answer(streams: Streams, answer: bytes, replies: int, retryable: bool) -> None:
    async def serve(_: Server, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        raise ConnectionError

    async with serving(serve) as (_, url):
        async with post(streams, url) as stream:
            if replies:
                assert len(await stream.read()) == replies
            with pytest.raises(EngineLost) as error:
                await stream.read()
        assert error.value.retryable == retryable
        assert not streams.idle


async def test_an_idle_connection_that_was_closed_or_spoke_is_not_used_again(streams: Streams) -> None:
    for spoken in (b"", b"HTTP/1.1 408 Too late\r\n\r\n"):

        async def serve(server: Server, _: asyncio.StreamReader, writer: asyncio.StreamWriter, spoken: bytes = spoken) -> None:
            writer.write(HEAD + END)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(spoken)
            if not spoken:
                raise ConnectionError

        streams.connections = None
        async with serving(serve) as (server, url):
            for _ in range(2):
                async with post(streams, url) as stream:
                    assert await read_all(stream) == []
                await asyncio.sleep(0.1)
            assert server.connections == 2


async def test_no_connection(streams: Streams, unused_tcp_port: int) -> None:
    with pytest.raises(NotReady) as error:
        async with post(streams, URL(f"http://127.0.0.1:{unused_tcp_port}/generate")):
            pass
    assert error.value.retryable
    assert isinstance(error.value, GatewayError)


def taking(taken: list[wire.Delta], refused: set[int]) -> Callable[[wire.Delta], bool]:
    """Return a function that takes deltas, but those with an offset in ``refused``."""

    def take(delta: wire.Delta) -> bool:
        if delta.offset in refused:
            return False
        taken.append(delta)
        return True

    return take


async def test_a_delta_that_arrives_alone_may_be_taken_without_the_reader(streams: Streams) -> None:
    frames = [wire.pack_frame(delta(place)) for place in range(8)]
    pair = chunk(frames[4] + frames[5])
    cut = chunk(frames[6])
    parts = [*map(chunk, frames[:4]), pair, cut[:9], cut[9:], chunk(frames[7]) + END]
    taken: list[wire.Delta] = []
    async with serving(answers(HEAD, *parts)) as (_, url), post(streams, url) as stream:
        read = await read_all(stream, taking(taken, {1}))
    assert sorted(each.offset for each in [*taken, *read]) == list(range(8))  # type: ignore[union-attr]
    assert {0, 2, 3, 6} <= {each.offset for each in taken} | {0}, "the first may arrive before the reader waits"
    assert {1, 4, 5, 7} <= {each.offset for each in read}, "refused, two at a time, and with the end"  # type: ignore[union-attr]


async def test_what_fails_while_a_delta_is_taken_fails_the_reader(streams: Streams) -> None:
    def take(_: wire.Delta) -> bool:
        raise ValueError("of the taker")

    parts = [chunk(wire.pack_frame(delta(place))) for place in range(9)]
    async with serving(answers(HEAD, *parts)) as (_, url), post(streams, url) as stream:
        with pytest.raises(ValueError, match="of the taker"):
            await read_all(stream, take)


async def test_an_answer_that_is_one_message(streams: Streams) -> None:
    body = bytes(range(256)) * 1000
    pieces = [body[begin : begin + 60_000] for begin in range(0, len(body), 60_000)]
    async with serving(answers(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), *pieces)) as (server, url):
        for _ in range(2):
            async with post(streams, url, framed=False) as stream:
                assert await stream.read_whole() == body
                assert stream.status == 200
        assert server.connections == 1
        async with post(streams, url) as stream:
            with pytest.raises(EngineLost):
                await read_all(stream)


def test_the_largest_message_of_an_engine_is_within_the_bound() -> None:
    def largest(tokens: int) -> wire.Logprobs:
        ids, numbers = [[1 << 20] * MAX_LOGPROBS] * tokens, [[-1 / 3] * MAX_LOGPROBS] * tokens
        return wire.Logprobs(numbers[0][:1] * tokens, ids, numbers, numbers)

    message = wire.Delta("x" * 32, 0, [1 << 20] * WHOLE_TOKENS, logprobs=largest(WHOLE_TOKENS))
    message = msgspec.structs.replace(message, prompt_logprobs=largest(wire.PROMPT_PART))
    assert len(wire.pack_frame(message)) < MAX_MESSAGE / 3


STATS = wire.Stats(0, 0, 10, 10, 0, 1, 1, 1)


@asynccontextmanager
async def client_of(serve: Serve, token: EngineToken | None = None, path: str = "") -> AsyncIterator[tuple[EngineClient, Server]]:
    async with serving(serve, b"") as (server, url):
        client = EngineClient(f"{url.origin()}{path}", connect_seconds=1, engine_seconds=0.3, token=token)
        yield client, server
        client.close()


def answer(content: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


READY = answer(b"ok", "200 OK", "X-Yardstick-Model: org%2Fone", "x-yardstick-adapters: a-1")


@pytest.mark.parametrize("size", [1, 7, len(READY)])
async def test_a_probe_reads_the_headers(size: int) -> None:
    parts = [READY[start : start + size] for start in range(0, len(READY), size)]
    async with client_of(answers(*parts)) as (client, server):
        assert await client.ready() == Readiness(ready=True, model="org/one", adapters="a-1")
        assert server.requests == [f"GET /readyz HTTP/1.1\r\nhost: {client.url[7:]}\r\n\r\n".encode()]


async def test_all_paths_of_an_engine_share_a_connection(tmp_path: Path) -> None:
    async def serve(server: Server, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(wire.encode(STATS)) if b"/stats" in server.requests[-1] else READY)

    (tmp_path / "token").write_text("secret\n")
    async with client_of(serve, EngineToken(tmp_path / "token"), "/base") as (client, server):
        assert (await client.ready()).ready
        assert await client.stats() == STATS
        assert server.connections == 1
    assert [request.split()[1] for request in server.requests] == [b"/base/readyz", b"/base/stats"]
    assert all(b"\r\nauthorization: Bearer secret\r\n" in request for request in server.requests)


async def test_a_request_on_a_connection_that_was_just_closed_is_sent_again() -> None:
    async def serve(server: Server, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) != 2:
            writer.write(READY)
        else:
            writer.close()

    async with client_of(serve) as (client, server):
        assert (await client.ready()).ready
        assert (await client.ready()).ready
        assert (len(server.requests), server.connections) == (3, 2)


ENDLESS = {
    "head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * MAX_OVERHEAD,
    "header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2 * MAX_OVERHEAD,
    "refusal": b"HTTP/1.1 500 No\r\ncontent-length: 9999999\r\n\r\n" + b"y" * 2 * MAX_OVERHEAD,
    "trailer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: " + b"y" * 2 * MAX_OVERHEAD,
}


@pytest.mark.parametrize("part", ENDLESS)
async def test_endless_answers_are_cut_off(part: str) -> None:
    async with client_of(answers(ENDLESS[part])) as (client, _), asyncio.timeout(5):
        with pytest.raises(EngineLost):
            await client.stats()


async def test_a_large_answer_in_small_chunks_is_read() -> None:
    content = wire.encode(wire.TokenizerFiles(b"x" * 3_000_000, "", {}))
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in (content[at : at + 100] for at in range(0, len(content), 100))
    )
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nx-yardstick-adapters: trailer\r\n\r\n"
    async with client_of(answers(whole)) as (client, _):
        assert wire.encode(await client.tokenizer()) == content
