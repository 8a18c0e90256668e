"""Images are fetched from allowed hosts only, whatever URLs and servers say, and slow servers of one key hold up no other key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext

import pytest
from prometheus_client import CollectorRegistry

from tests.pictures import picture
from tests.processes import until
from yardstick_llm.gateway.errors import Overloaded
from yardstick_llm.gateway.images.decode import InvalidImage
from yardstick_llm.gateway.images.fetch import MAX_URLS, ImageFetcher, ImageRoom
from yardstick_llm.gateway.ops.metrics import ImageMetrics
from yardstick_llm.gateway.process.bounds import Tenant

MOST = 20_000
Handle = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """An HTTP server on 127.0.0.1 that answers each path as a test says, and notes the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answers: dict[str, bytes | Handle] = {}
        self.port = 0

    def image(
        self, path: str, content: bytes = b"", *, head: str = "Content-Type: image/png", length: int | str | None = None
    ) -> None:
        content = content or picture(1)
        size = len(content) if length is None else length
        self.answers[path] = f"HTTP/1.1 200 OK\r\n{head}\r\nContent-Length: {size}\r\n\r\n".encode() + content

    def redirect(self, path: str, to: str) -> None:
        self.answers[path] = f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            path = head.split()[1].partition("?")[0]
            answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(path, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


def fetcher(*hosts: str, seconds: float = 5.0) -> ImageFetcher:
    metrics = ImageMetrics(CollectorRegistry())
    return ImageFetcher(hosts, metrics, seconds=seconds, most_bytes=MOST, most_request_bytes=MOST * 2)


async def fetch_all(fetcher: ImageFetcher, wanted: dict[str, str]) -> dict[str, bytes]:
    fetcher.check(wanted)
    return await fetcher.fetch_all(wanted, Tenant(), lambda _: None)


async def fetch(fetcher: ImageFetcher, url: str) -> bytes:
    return (await fetch_all(fetcher, {url: "here"}))[url]


async def refused(fetcher: ImageFetcher, url: str, reason: str, words: str = ".") -> None:
    with pytest.raises(InvalidImage, match=words) as caught:
        await fetch(fetcher, url)
    assert (caught.value.reason, caught.value.param) == (reason, "here")


async def test_an_image_is_fetched_from_an_allowed_host(server: Server) -> None:
    server.image("/a.png")
    allowed = fetcher(f"LOCALHOST:{server.port}")
    assert await fetch(allowed, f"http://LOCALHOST:{server.port}/a.png") == picture(1)
    (request,) = server.requests
    lines = request.lower().splitlines()
    assert f"host: localhost:{server.port}" in lines
    assert not any(line.startswith(("cookie", "authorization")) for line in lines)


@pytest.mark.parametrize(
    ("entry", "scheme", "port", "allowed"),
    [
        ("a.test", "https", "", True),
        ("a.test", "https", ":443", True),
        ("a.test:443", "https", "", True),
        ("a.test:443", "https", ":443", True),
        ("a.test:443", "http", ":443", True),
        ("a.test:80", "http", "", True),
        ("a.test:443", "http", "", False),
        ("a.test:80", "https", "", False),
        ("a.test", "http", ":443", False),
        ("a.test", "https", ":8443", False),
        ("a.test:8443", "https", "", False),
    ],
)
def test_a_default_port_may_be_written_or_left_out(entry: str, scheme: str, port: str, allowed: bool) -> None:
    checked = fetcher(entry)
    with nullcontext() if allowed else pytest.raises(InvalidImage, match="does not allow"):
        checked.check({f"{scheme}://a.test{port}/a.png": "here"})


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        "http://images.test.evil.test/",
        "http://evil-images.test/",
        "http://images.test:8080/",
        "http://images.test@other.test/",
        "http://user:word@images.test/",
        "http://images.test./",
        "ftp://images.test/",
        "http://below.images.test.other/",
        "http:///x",
    ],
)
async def test_other_hosts_are_refused(url: str) -> None:
    await refused(fetcher("images.test"), url, "host")


async def test_redirects_are_not_followed(server: Server) -> None:
    server.image("/a.png")
    server.redirect("/other", f"http://127.0.0.1:{server.port}/a.png")
    await refused(fetcher(f"127.0.0.1:{server.port}"), f"http://127.0.0.1:{server.port}/other", "fetch", "status 302")
    assert len(server.requests) == 1


async def test_hosts_that_do_not_answer_are_refused(server: Server) -> None:
    await refused(fetcher("127.0.0.1:9"), "http://127.0.0.1:9/", "fetch", "cannot be fetched")
    await refused(fetcher("no-such-host.invalid"), "http://no-such-host.invalid/", "fetch", "cannot be fetched")


async def test_slow_and_endless_bodies_end(server: Server) -> None:
    async def slow(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    sent = 0

    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + bytes(4096) + b"\r\n")
            sent += 4096
            await writer.drain()

    server.answers |= {"/slow": slow, "/endless": endless}
    await refused(fetcher(f"127.0.0.1:{server.port}", seconds=0.3), f"http://127.0.0.1:{server.port}/slow", "fetch", "within 0.3 s")
    await refused(fetcher(f"127.0.0.1:{server.port}"), f"http://127.0.0.1:{server.port}/endless", "fetch", "more than 20000 bytes")


async def test_answers_that_are_no_image_are_refused(server: Server) -> None:
    allowed, base = fetcher(f"127.0.0.1:{server.port}"), f"http://127.0.0.1:{server.port}"
    server.image("/html", head="Content-Type: text/html")
    server.image("/none", head="X: y")
    server.image("/gzip", head="Content-Type: image/png\r\nContent-Encoding: gzip")
    server.image("/large", head="Content-Type: image/png", length=MOST + 1)
    server.image("/short", length=len(picture(1)) + 100)
    server.image("/long", length=50)
    server.answers["/garbage"] = b"this is no HTTP\r\n\r\n"
    server.image("/digits", length="9" * 5000)
    await refused(allowed, f"{base}/html", "fetch", "Content-Type")
    await refused(allowed, f"{base}/none", "fetch", "Content-Type")
    await refused(allowed, f"{base}/gzip", "fetch", "Content-Encoding")
    await refused(allowed, f"{base}/large", "fetch", "more than 20000 bytes")
    await refused(allowed, f"{base}/short", "fetch")
    await refused(allowed, f"{base}/garbage", "fetch")
    await refused(allowed, f"{base}/digits", "fetch")
    await refused(allowed, f"{base}/missing", "fetch", "status 404")
    assert len(await fetch(allowed, f"{base}/long")) == 50


async def test_bytes_are_counted_before_they_are_kept(server: Server) -> None:
    content = picture(1)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:3000], content[3000:], b""))
    server.image("/whole")
    server.answers["/chunks"] = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    for path in ("whole", "chunks"):
        taken: list[int] = []
        url = f"http://127.0.0.1:{server.port}/{path}"
        found = await fetcher(f"127.0.0.1:{server.port}").fetch_all({url: "here"}, Tenant(), taken.append)
        assert found == {url: content}
        assert sum(taken) == len(content)
        assert len(taken) == 1 or path == "chunks"


async def test_many_urls_are_fetched_at_once_and_the_field_is_named(server: Server) -> None:
    server.image("/a.png")
    base = f"http://127.0.0.1:{server.port}"
    allowed = fetcher(f"127.0.0.1:{server.port}")
    server.image("/b.png", picture(2))
    found = await fetch_all(allowed, {f"{base}/a.png": "messages[0]", f"{base}/b.png": "messages[1]"})
    assert found == {f"{base}/a.png": picture(1), f"{base}/b.png": picture(2)}
    with pytest.raises(InvalidImage) as caught:
        await fetch_all(allowed, {f"{base}/a.png": "x", f"{base}/none": "messages[2].content[1]"})
    assert caught.value.param == "messages[2].content[1]"
    for number in range(3):
        server.image(f"/{number}", bytes(MOST - 100))
    with pytest.raises(InvalidImage, match="40000 bytes together"):
        await fetch_all(allowed, {f"{base}/{number}": "x" for number in range(3)})
    with pytest.raises(InvalidImage, match="at most 32"):
        await fetch_all(allowed, {f"{base}/{number}": "x" for number in range(33)})


A, B = Tenant("a"), Tenant("b")
SIZE = 16_000
"""Bytes that the server of these tests sends before it waits."""


class Slow(Server):
    """It answers ``/slow`` in two parts and waits between them, and ``/a.png`` with a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.waiting = 0
        self.image("/a.png")
        self.answers["/slow"] = self._slow

    async def _slow(self, _: str, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {SIZE + 1}\r\n\r\n".encode() + bytes(SIZE))
        self.waiting += 1
        await self.go_on.wait()
        writer.write(b"x")
        await writer.drain()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def slow_server() -> AsyncIterator[Slow]:
    server = Slow()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server
        server.go_on.set()


def slow_fetcher(slow_server: Slow, *, metrics: ImageMetrics | None = None) -> ImageFetcher:
    hosts, metrics = [f"127.0.0.1:{slow_server.port}"], metrics or ImageMetrics(CollectorRegistry())
    return ImageFetcher(hosts, metrics, seconds=20, most_bytes=1 << 20, most_request_bytes=1 << 20)


def urls(base: str, count: int = MAX_URLS) -> dict[str, str]:
    return {f"{base}?{number}": f"here[{number}]" for number in range(count)}


def kept(_: int) -> None:
    """Room without bounds."""


async def test_slow_servers_of_one_key_leave_places_for_another(slow_server: Slow) -> None:
    fetching = slow_fetcher(slow_server)
    slow = [asyncio.create_task(fetching.fetch_all(urls(f"{slow_server.url}/slow"), A, kept)) for _ in range(8)]
    await until(lambda: slow_server.waiting == 7 * MAX_URLS)
    async with asyncio.timeout(10):
        assert len(await fetching.fetch_all(urls(f"{slow_server.url}/a.png"), B, kept)) == MAX_URLS
    assert sum(task.done() for task in slow) == 1
    slow_server.go_on.set()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*slow, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 1
    async with asyncio.timeout(10):
        assert len(await fetching.fetch_all(urls(f"{slow_server.url}/a.png"), A, kept)) == MAX_URLS, "all places are free again"


async def test_bytes_that_arrive_are_bounded_over_all_requests(slow_server: Slow) -> None:
    registry = CollectorRegistry()
    metrics = ImageMetrics(registry)
    room = ImageRoom(6 * SIZE, metrics)
    fetching = slow_fetcher(slow_server, metrics=metrics)

    def held() -> float:
        return registry.get_sample_value("yardstick_image_bytes_held") or 0.0

    async def request(number: int) -> int:
        tenant = Tenant(f"key {number % 3}")
        with room.receiving(tenant) as take:
            found = await fetching.fetch_all({f"{slow_server.url}/slow?{number}": "here"}, tenant, take)
            assert held() <= 6 * SIZE
            return sum(map(len, found.values()))

    tasks = [asyncio.create_task(request(number)) for number in range(30)]
    await until(lambda: slow_server.waiting == 30 and sum(task.done() for task in tasks) >= 24)
    assert 3 * SIZE <= held() <= 6 * SIZE
    slow_server.go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    served = [result for result in results if result == SIZE + 1]
    assert len(served) + len(refused) == 30
    assert 3 <= len(served) <= 6
    assert registry.get_sample_value("yardstick_images_refused_total", {"reason": "room"}) == len(refused)
    assert held() == 0
