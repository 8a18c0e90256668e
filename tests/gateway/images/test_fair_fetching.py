"""Slow servers of one key hold up no other key, and bytes are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from tests.pictures import picture
from tests.processes import until
from yardstick_llm.gateway.errors import Overloaded
from yardstick_llm.gateway.images.fetch import MAX_URLS, ImageFetcher, ImageRoom
from yardstick_llm.gateway.ops.metrics import ImageMetrics
from yardstick_llm.gateway.process.bounds import Tenant

A, B = Tenant("a"), Tenant("b")
SIZE = 16_000
"""Bytes that the server of these tests sends before it waits."""


class Slow:
    """An HTTP server on 127.0.0.1: it answers ``/slow`` in two parts and waits between them, and all else with a picture."""

    def __init__(self) -> None:
        self.port = 0
        self.go_on = asyncio.Event()
        self.waiting = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            slow = b"/slow" in await reader.readuntil(b"\r\n\r\n")
            content = bytes(SIZE) if slow else picture(1)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(content) + slow}\r\n\r\n"
            writer.write(head.encode() + content)
            if slow:
                self.waiting += 1
                await self.go_on.wait()
                writer.write(b"x")
            await writer.drain()
        writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def server() -> AsyncIterator[Slow]:
    server = Slow()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server
        server.go_on.set()


def fetcher(server: Slow, *, metrics: ImageMetrics | None = None) -> ImageFetcher:
    hosts, metrics = [f"127.0.0.1:{server.port}"], metrics or ImageMetrics(CollectorRegistry())
    return ImageFetcher(hosts, metrics, seconds=20, most_bytes=1 << 20, most_request_bytes=1 << 20)


def urls(base: str, count: int = MAX_URLS) -> dict[str, str]:
    return {f"{base}?{number}": f"here[{number}]" for number in range(count)}


def kept(_: int) -> None:
    """Room without bounds."""


async def test_slow_servers_of_one_key_leave_places_for_another(server: Slow) -> None:
    fetching = fetcher(server)
    slow = [asyncio.create_task(fetching.fetch_all(urls(f"{server.url}/slow"), A, kept)) for _ in range(8)]
    await until(lambda: server.waiting == 7 * MAX_URLS)
    async with asyncio.timeout(10):
        assert len(await fetching.fetch_all(urls(f"{server.url}/a.png"), B, kept)) == MAX_URLS
    assert sum(task.done() for task in slow) == 1
    server.go_on.set()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*slow, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 1
    async with asyncio.timeout(10):
        assert len(await fetching.fetch_all(urls(f"{server.url}/a.png"), A, kept)) == MAX_URLS, "all places are free again"


async def test_bytes_that_arrive_are_bounded_over_all_requests(server: Slow) -> None:
    registry = CollectorRegistry()
    metrics = ImageMetrics(registry)
    room = ImageRoom(6 * SIZE, metrics)
    fetching = fetcher(server, metrics=metrics)

    def held() -> float:
        return registry.get_sample_value("yardstick_image_bytes_held") or 0.0

    async def request(number: int) -> int:
        tenant = Tenant(f"key {number % 3}")
        with room.receiving(tenant) as take:
            found = await fetching.fetch_all({f"{server.url}/slow?{number}": "here"}, tenant, take)
            assert held() <= 6 * SIZE
            return sum(map(len, found.values()))

    tasks = [asyncio.create_task(request(number)) for number in range(30)]
    await until(lambda: server.waiting == 30 and sum(task.done() for task in tasks) >= 24)
    assert 3 * SIZE <= held() <= 6 * SIZE
    server.go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    served = [result for result in results if result == SIZE + 1]
    assert len(served) + len(refused) == 30
    assert 3 <= len(served) <= 6
    assert registry.get_sample_value("yardstick_images_refused_total", {"reason": "room"}) == len(refused)
    assert held() == 0
