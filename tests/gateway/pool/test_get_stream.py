"""``GET`` requests to an engine, against raw servers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost
from yardstick_llm.gateway.pool.client import EngineClient, EngineToken, Readiness
from yardstick_llm.gateway.pool.connection import MAX_OVERHEAD

STATS = wire.Stats(0, 0, 10, 10, 0, 1, 1, 1)
Serve = Callable[["Server", asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads requests and answers each by ``serve``."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await self._serve(self, writer)
        writer.close()
        self.closed += 1


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Server]:
    server = Server(serve)
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server
        await until(lambda: server.closed == server.connections)


@asynccontextmanager
async def client_of(serve: Serve, token: EngineToken | None = None, path: str = "") -> AsyncIterator[tuple[EngineClient, Server]]:
    async with serving(serve) as server:
        client = EngineClient(f"{server.url}{path}", connect_seconds=1, engine_seconds=0.3, token=token)
        yield client, server
        client.close()


def answer(content: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def answers(*parts: bytes, close: bool = False) -> Serve:
    async def serve(_: Server, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        if close:
            writer.close()

    return serve


READY = answer(b"ok", "200 OK", "X-Yardstick-Model: org%2Fone", "x-yardstick-adapters: a-1")


@pytest.mark.parametrize("size", [1, 7, len(READY)])
async def test_a_probe_reads_the_headers(size: int) -> None:
    parts = [READY[start : start + size] for start in range(0, len(READY), size)]
    async with client_of(answers(*parts)) as (client, server):
        assert await client.ready() == Readiness(ready=True, model="org/one", adapters="a-1")
        assert server.requests == [f"GET /readyz HTTP/1.1\r\nhost: {server.url[7:]}\r\n\r\n".encode()]


async def test_all_paths_of_an_engine_share_a_connection(tmp_path: Path) -> None:
    async def serve(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(wire.encode(STATS)) if b"/stats" in server.requests[-1] else READY)

    (tmp_path / "token").write_text("secret\n")
    async with client_of(serve, EngineToken(tmp_path / "token"), "/base") as (client, server):
        assert (await client.ready()).ready
        assert await client.stats() == STATS
        assert server.connections == 1
    assert [request.split()[1] for request in server.requests] == [b"/base/readyz", b"/base/stats"]
    assert all(b"\r\nauthorization: Bearer secret\r\n" in request for request in server.requests)


async def test_a_request_on_a_connection_that_was_just_closed_is_sent_again() -> None:
    async def serve(server: Server, writer: asyncio.StreamWriter) -> None:
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
