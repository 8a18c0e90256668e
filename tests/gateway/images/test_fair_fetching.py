"""Slow names and slow servers of one key hold up neither other keys nor the rest of the gateway, and bytes are bounded."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.errors import Overloaded
from gateway.images.addresses import MAX_LOOKUPS, Resolver
from gateway.images.errors import InvalidImage
from gateway.images.fetch import MAX_URLS, ImageFetcher, Names
from gateway.images.room import ImageRoom
from gateway.metrics.images import ImageMetrics
from gateway.pool.discovery.dns import Dns
from gateway.process.fair_room import Tenant
from tests.pictures import picture
from tests.processes import until

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
        return f"http://a.test:{self.port}"


@pytest.fixture
async def server() -> AsyncIterator[Slow]:
    server = Slow()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server
        server.go_on.set()


def fetcher(
    server: Slow | None = None, *, seconds: float = 20, names: Names | None = None, metrics: ImageMetrics | None = None
) -> ImageFetcher:
    metrics = metrics or ImageMetrics(CollectorRegistry())
    names = names or Names(Resolver(lambda host, port: ["127.0.0.1"]), lambda _: True)
    hosts = ("*", f"*:{server.port}" if server else "*")
    return ImageFetcher(hosts, metrics, seconds=seconds, most_bytes=1 << 20, most_request_bytes=1 << 20, names=names)


def urls(base: str, count: int = MAX_URLS) -> dict[str, str]:
    return {f"{base}?{number}": f"here[{number}]" for number in range(count)}


def kept(_: int) -> None:
    """Room without bounds."""


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Names that end in ``.slow`` are resolved at the end of the test. Returns the number of threads that resolve them."""
    real, end, running = socket.getaddrinfo, threading.Event(), 0

    def slow(host: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal running
        if not str(host).endswith(".slow"):
            return real(host, *arguments, **options)
        running += 1
        end.wait(60)
        running -= 1
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield lambda: running
    end.set()


async def test_slow_names_delay_nothing_else(slow_names: Callable[[], int]) -> None:
    fetching = fetcher(seconds=0.5, names=Names(Resolver()))
    for number in range(3):  # the first round may end while certificates are loaded
        wanted = {f"http://{name}-{number}.slow/": "here" for name in range(MAX_URLS)}
        requests = [fetching.fetch_all(wanted, A, kept) for _ in range(3)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, InvalidImage) and "within 0.5 s" in result.message for result in results)
    assert MAX_LOOKUPS // 2 < slow_names() < MAX_LOOKUPS, "one key leaves threads for others"
    async with asyncio.timeout(10):
        assert await anext(Dns("localhost", 1, resolve_seconds=1).follow())
        assert await asyncio.to_thread(lambda: "the event loop's own threads are free")
        with pytest.raises(InvalidImage, match="not public"):
            await fetching.fetch_all({"http://localhost/": "here"}, B, kept)


async def test_a_lookup_keeps_its_place_until_its_thread_ends() -> None:
    end, running = threading.Event(), 0

    def lookup(host: str, port: int) -> list[str]:
        nonlocal running
        running += 1
        end.wait(60)
        running -= 1
        if host == "none.test":
            raise OSError("no such host")
        return [host]

    resolver = Resolver(lookup, most=4)
    left = [asyncio.create_task(resolver.addresses("none.test", 80, Tenant())) for _ in range(6)]
    await until(lambda: running == 4)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    later = asyncio.create_task(resolver.addresses("a.test", 80, Tenant()))
    await asyncio.sleep(0.05)
    assert (running, later.done()) == (4, False), "the threads cannot be stopped"
    end.set()
    assert await asyncio.wait_for(later, 10) == ["a.test"]
    await until(lambda: running == 0)


async def test_slow_servers_of_one_key_leave_places_for_another(server: Slow) -> None:
    fetching = fetcher(server)
    slow = [asyncio.create_task(fetching.fetch_all(urls(f"{server.url}/slow"), A, kept)) for _ in range(4)]
    await until(lambda: server.waiting >= 32)
    async with asyncio.timeout(10):
        assert len(await fetching.fetch_all(urls(f"{server.url}/a.png"), B, kept)) == MAX_URLS
    assert not any(task.done() for task in slow)
    server.go_on.set()
    async with asyncio.timeout(20):
        assert [len(found) for found in await asyncio.gather(*slow)] == [MAX_URLS] * 4


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
