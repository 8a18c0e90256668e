"""Images are fetched from allowed hosts with public addresses only, whatever URLs, resolvers and servers do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.images.addresses import Lookup, Resolver, is_public, look_up
from gateway.images.errors import InvalidImage
from gateway.images.fetch import ImageFetcher, Names, PinnedTransport
from gateway.metrics.images import ImageMetrics
from gateway.process.fair_room import Tenant
from tests.pictures import picture

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
            path = head.split()[1]
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


def fetcher(
    *hosts: str,
    addresses: Sequence[str] = ("127.0.0.1",),
    allows: Callable[[str], bool] = lambda address: address == "127.0.0.1",
    seconds: float = 5.0,
    lookup: Lookup | None = None,
) -> ImageFetcher:
    metrics = ImageMetrics(CollectorRegistry())
    names = Names(Resolver(lookup or (lambda host, port: addresses)), allows)
    return ImageFetcher(hosts, metrics, seconds=seconds, most_bytes=MOST, most_request_bytes=MOST * 2, names=names)


async def fetch_all(fetcher: ImageFetcher, wanted: dict[str, str]) -> dict[str, bytes]:
    fetcher.check(wanted)
    return await fetcher.fetch_all(wanted, Tenant(), lambda _: None)


async def fetch(fetcher: ImageFetcher, url: str) -> bytes:
    return (await fetch_all(fetcher, {url: "here"}))[url]


async def refused(fetcher: ImageFetcher, url: str, reason: str, words: str = ".") -> None:
    with pytest.raises(InvalidImage, match=words) as caught:
        await fetch(fetcher, url)
    assert (caught.value.reason, caught.value.param) == (reason, "here")


async def test_an_image_is_fetched_from_the_checked_address(server: Server) -> None:
    server.image("/a.png")
    allowed = fetcher(f"images.test:{server.port}")
    assert await fetch(allowed, f"http://images.test:{server.port}/a.png") == picture(1)
    (request,) = server.requests
    lines = request.lower().splitlines()
    assert f"host: images.test:{server.port}" in lines
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
        ("*.test:443", "https", "", True),
        ("*:443", "https", "", True),
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
        "http://domain.test/",
        "http://xdomain.test/",
    ],
)
async def test_other_hosts_are_refused(url: str) -> None:
    await refused(fetcher("images.test", "*.domain.test"), url, "host")


async def test_names_below_a_domain_are_allowed(server: Server) -> None:
    server.image("/a.png")
    allowed = fetcher(f"*.domain.test:{server.port}", f"EXACT.test:{server.port}")
    for host in ("a.domain.test", "b.a.DOMAIN.test", "exact.TEST"):
        assert await fetch(allowed, f"http://{host}:{server.port}/a.png")


async def test_without_a_list_nothing_is_fetched() -> None:
    await refused(fetcher(), "https://images.test/a.png", "host", "fetches none")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200",
        "0.0.0.0", "168.63.129.16", "192.0.0.192",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.88.99.1", "203.0.113.9",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "::127.0.0.1", "not an address",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "017700000001", "127.1", "0", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1"]
)
async def test_spellings_of_this_machine_are_refused_after_resolving(server: Server, host: str) -> None:
    everyone = fetcher(f"*:{server.port}", lookup=look_up, allows=is_public)
    server.image("/")
    with pytest.raises(InvalidImage) as caught:
        await fetch(everyone, f"http://{host}:{server.port}/")
    assert caught.value.reason in ("host", "fetch")
    assert server.requests == []


async def test_one_private_address_among_public_ones_is_refused(server: Server) -> None:
    mixed = fetcher(f"a.test:{server.port}", addresses=["127.0.0.1", "10.0.0.1"])
    await refused(mixed, f"http://a.test:{server.port}/", "host", "not public")
    assert server.requests == []


async def test_a_resolver_that_changes_its_answer_changes_nothing(server: Server) -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    asked: list[str] = []

    def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    server.image("/a.png")
    changing = fetcher(f"a.test:{server.port}", lookup=rebinding)
    assert await fetch(changing, f"http://a.test:{server.port}/a.png") == picture(1)
    assert asked == ["a.test"], "resolved once: the connection goes to the address that was checked"
    await refused(changing, f"http://a.test:{server.port}/a.png", "host", "not public")


async def test_redirects_go_through_the_same_checks(server: Server) -> None:
    addresses = {"a.test": "127.0.0.1", "b.test": "127.0.0.1", "inside.test": "10.0.0.1"}

    port = server.port
    allowed = fetcher(f"a.test:{port}", f"b.test:{port}", f"inside.test:{port}", lookup=lambda host, port: [addresses[host]])
    server.image("/a.png")
    server.redirect("/relative", "/a.png")
    server.redirect("/other", f"http://b.test:{port}/relative")
    server.redirect("/inside", f"http://inside.test:{port}/a.png")
    server.redirect("/unlisted", f"http://c.test:{port}/a.png")
    server.redirect("/file", "file:///etc/passwd")
    server.redirect("/loop", "/loop")
    server.redirect("/nowhere", "http://[::/")
    assert await fetch(allowed, f"http://a.test:{port}/relative") == picture(1)
    assert await fetch(allowed, f"http://a.test:{port}/other") == picture(1)
    await refused(allowed, f"http://a.test:{port}/inside", "host", "not public")
    await refused(allowed, f"http://a.test:{port}/unlisted", "host", "does not allow")
    await refused(allowed, f"http://a.test:{port}/file", "host", "scheme")
    await refused(allowed, f"http://a.test:{port}/loop", "fetch", "3 redirects")
    await refused(allowed, f"http://a.test:{port}/nowhere", "fetch")


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
    await refused(fetcher(f"a.test:{server.port}", seconds=0.3), f"http://a.test:{server.port}/slow", "fetch", "within 0.3 s")
    await refused(fetcher(f"a.test:{server.port}"), f"http://a.test:{server.port}/endless", "fetch", "more than 20000 bytes")


async def test_answers_that_are_no_image_are_refused(server: Server) -> None:
    allowed, base = fetcher(f"a.test:{server.port}"), f"http://a.test:{server.port}"
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
        url = f"http://a.test:{server.port}/{path}"
        found = await fetcher(f"a.test:{server.port}").fetch_all({url: "here"}, Tenant(), taken.append)
        assert found == {url: content}
        assert sum(taken) == len(content)
        assert len(taken) == 1 or path == "chunks"


async def test_hosts_without_an_address_are_refused() -> None:
    def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    await refused(fetcher("a.test", lookup=unknown), "http://a.test/", "fetch", "no address")
    await refused(fetcher("a.test", addresses=[]), "http://a.test/", "fetch", "no address")


async def test_certificates_are_checked_for_the_name() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    names = Names(Resolver(lambda host, port: ["2606:4700::1"]))
    transport = PinnedTransport(httpx.MockTransport(answer), names, Tenant(), seconds=5)
    await transport.handle_async_request(httpx.Request("GET", "https://images.example/a?b"))
    (request,) = seen
    assert str(request.url) == "https://[2606:4700::1]/a?b"
    assert request.headers["host"] == "images.example"
    assert request.extensions["sni_hostname"] == "images.example"


async def test_many_urls_are_fetched_at_once_and_the_field_is_named(server: Server) -> None:
    server.image("/a.png")
    base = f"http://a.test:{server.port}"
    allowed = fetcher(f"a.test:{server.port}")
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


async def test_the_other_addresses_are_tried(server: Server) -> None:
    """Nothing listens at 127.0.0.2, and 127.0.0.3 accepts no connection: its queue is full."""
    server.image("/a.png")
    with socket.socket() as deaf, socket.socket() as waiting:
        deaf.bind(("127.0.0.3", server.port))
        deaf.listen(0)
        waiting.connect(deaf.getsockname())
        addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
        allowed = fetcher(f"a.test:{server.port}", addresses=addresses, allows=lambda _: True, seconds=4)
        assert await fetch(allowed, f"http://a.test:{server.port}/a.png") == picture(1)
        alone = fetcher(f"a.test:{server.port}", addresses=addresses[:2], allows=lambda _: True, seconds=0.5)
        await refused(alone, f"http://a.test:{server.port}/a.png", "fetch", "within 0.5 s")
    many = fetcher(f"a.test:{server.port}", addresses=["127.0.0.2"] * 4 + ["127.0.0.1"], allows=lambda _: True)
    await refused(many, f"http://a.test:{server.port}/a.png", "fetch", "cannot be fetched")


async def test_a_redirect_from_https_to_http_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.image("/a.png")
    allowed = fetcher("a.test", f"a.test:{server.port}")

    async def transport() -> httpx.AsyncBaseTransport:
        return httpx.MockTransport(lambda _: httpx.Response(302, headers={"location": f"http://a.test:{server.port}/a.png"}))

    monkeypatch.setattr(allowed, "_transport", transport)
    await refused(allowed, "https://a.test/a.png", "fetch", "from https to http")
    assert server.requests == []
