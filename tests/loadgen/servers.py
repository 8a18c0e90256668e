"""Servers that misbehave on the wire, on real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: Any


Handler = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """The base URL of a server that hands each request to ``handler`` and keeps the connection unless that closes it."""
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else None
                await handler(Request(head[0].split()[1], headers, body), writer)
                await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def answer(writer: asyncio.StreamWriter, body: bytes | dict[str, Any], status: str = "200 OK", **headers: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {"content_length": len(content), **headers}.items()]
    writer.write("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + content)


def stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def event(writer: asyncio.StreamWriter, data: dict[str, Any] | str) -> None:
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(text), text))


def end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")


def scores(request: Request) -> dict[str, Any]:
    return {"scores": [[0.25, 0.75]] * len(request.body["items"]), "usage": {"prompt_tokens": 7, "total_tokens": 7}}


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
