"""Hostile and careless HTTP: each attack against a gateway process, by raw sockets where no client library sends the like."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from tests.attacks.conftest import StartGateway
from tests.attacks.raw import Answer, connected, parse, read_answer, read_to_end, request
from tests.attacks.watch import Watch, metric_of, settled_mib, tree_mib
from tests.fakes import FakeEngine, ids
from tests.processes import Program, wait_until

SCORE = json.dumps({"query": [1], "items": [[2]], "label_token_ids": [1]}).encode()
ENDLESS = {"prompt": [1], "max_tokens": 300, "ignore_eos": True}
SECONDS = 1.0
"""Every time limit of the gateway under attack."""


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway) -> Program:
    program = start_gateway(
        header_seconds=SECONDS, body_seconds=SECONDS, body_bytes_per_second=20_000, write_seconds=SECONDS, idle_seconds=2 * SECONDS
    )
    program.client.close()  # a connection that it keeps may be closed for idleness at the moment of its next request
    program.client = httpx.Client(base_url=program.url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
    return program


@contextmanager
def slow(engine: FakeEngine, delay: float = 0.05) -> Iterator[None]:
    engine.faults.delay = delay
    try:
        yield
    finally:
        engine.faults.delay = 0


def post(gateway: Program, body: bytes, **headers: str) -> httpx.Response:
    return gateway.client.post("/v1/score", content=body, headers={"content-type": "application/json", **headers})


# --- upgrades


HTTP2 = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"}
"""Headers that Java's HttpClient adds to its first request."""
WEBSOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_key": "x", "sec_websocket_version": "13"}
UNKNOWN = {"connection": "keep-alive, Upgrade", "upgrade": "something/1"}


@pytest.mark.parametrize(
    ("headers", "pieces"),
    [
        (HTTP2, "one packet"),
        (HTTP2, "two packets"),
        (HTTP2, "many packets"),
        (WEBSOCKET, "one packet"),
        (UNKNOWN, "two packets"),
    ],
)
def test_an_upgrade_is_ignored_and_the_body_is_read(gateway: Program, headers: dict[str, str], pieces: str) -> None:
    whole = request("/v1/score", SCORE, user_agent="Java-http-client/21", **headers)
    head = len(whole) - len(SCORE)
    size = {"one packet": len(whole), "two packets": head, "many packets": 37}[pieces]
    with connected(gateway) as connection:
        for _ in range(2):  # the connection is kept
            for start in range(0, len(whole), size):
                connection.sendall(whole[start : start + size])
                time.sleep(0.02)
            answer = read_answer(connection)
            assert (answer.status, answer.rest) == (200, b""), answer
            assert "upgrade" not in answer.headers
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_connect_is_refused(gateway: Program) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost:80\r\n\r\n")
        answer = parse(read_to_end(connection))
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


# --- pipelining


@pytest.mark.parametrize("packets", [1, 2])
def test_a_pipelining_client_that_leaves_stops_the_engine(gateway: Program, engine: FakeEngine, packets: int) -> None:
    first, second = request("/v1/completions", json.dumps(ENDLESS).encode()), request("/v1/score", SCORE)
    with slow(engine):
        before = len(engine.generates), len(engine.left)
        with connected(gateway) as connection:
            connection.sendall(first + second if packets == 1 else first)
            wait_until(lambda: len(engine.generates) > before[0])
            if packets == 2:
                connection.sendall(second * 100)
                time.sleep(0.2)
            assert len(engine.left) == before[1]
        wait_until(lambda: len(engine.left) > before[1], 1)


@pytest.mark.parametrize("packets", [1, 2])
def test_the_first_of_pipelined_requests_is_answered_and_the_connection_closed(
    gateway: Program, engine: FakeEngine, packets: int
) -> None:
    scores = len(engine.scores)
    body = json.dumps({"query": [packets, 7], "items": [[2]], "label_token_ids": [1]}).encode()
    with slow(engine, 0.3), connected(gateway) as connection:
        connection.sendall(request("/v1/score", body) * (10 if packets == 1 else 1))
        time.sleep(0.1)
        connection.sendall(request("/v1/score", body) * 50)
        answer = parse(read_to_end(connection))
    assert (answer.status, answer.headers["connection"], answer.rest) == (200, "close", b"")
    assert len(engine.scores) == scores + 1


@pytest.mark.alone
@pytest.mark.waits
def test_pipelined_bytes_are_not_kept(gateway: Program, engine: FakeEngine) -> None:
    body = json.dumps(ENDLESS).encode()
    settled_mib(gateway.process.pid)
    with slow(engine, 0.01), Watch(gateway) as watch, connected(gateway) as connection:
        connection.sendall(request("/v1/completions", body))
        with suppress(OSError):
            for _ in range(200):
                connection.sendall(b"x" * 1_000_000)
    assert watch.grown_mib < 20
    assert watch.slowest_livez < 1
    wait_until(lambda: not engine.running, 2)


# --- HEAD


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/fake", "/schema", "/schema/openapi.json"]
)
def test_head_answers_like_get(gateway: Program, path: str) -> None:
    with connected(gateway) as connection:
        connection.sendall(request(path, method="HEAD", connection="close"))
        received = read_to_end(connection, seconds=30)
    head, _, body = received.partition(b"\r\n\r\n")
    got = gateway.client.get(path)
    assert (body, head.split()[1]) == (b"", b"200")
    headers = parse(head + b"\r\n\r\n").headers
    changing = {"date", "x-request-id", "connection", *(["content-length"] if path == "/metrics" else [])}
    assert {name: headers[name] for name in headers.keys() - changing} == {
        name: got.headers[name] for name in got.headers.keys() - changing
    }
    assert int(headers["content-length"]) > 0


# --- content codings


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip"])
def test_compressed_bodies_are_refused(gateway: Program, coding: str) -> None:
    answer = post(gateway, gzip.compress(SCORE), **{"content-encoding": coding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    assert post(gateway, SCORE, **{"content-encoding": "identity"}).status_code == 200


# --- requests that are not HTTP

POST = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BROKEN = {
    "no request": b"NONSENSE\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "another version": b"GET /livez HTTP/3.0\r\nhost: localhost\r\n\r\n",
    "version 2 by text": b"GET /livez HTTP/2.0\r\nhost: localhost\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
    "a target that is no path": b"GET localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a path beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a space before the colon": b"GET /livez HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "a folded header": b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n",
    "line feeds alone": b"GET /livez HTTP/1.1\nhost: localhost\n\n",
    "a NUL in a header": b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n",
    "a length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "a list of lengths": POST + b"content-length: 5, 5\r\n\r\nhello",
    "a signed length": POST + b"content-length: +5\r\n\r\nhello",
    "a length beyond 64 bits": POST + b"content-length: 99999999999999999999\r\n\r\n",
    "an unknown transfer coding": POST + b"transfer-encoding: gzip\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a bad chunk size": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_not_http_is_told_so_and_counted(gateway: Program, sent: bytes) -> None:
    counted = metric_of(gateway, 'yardstick_rejected_requests_total{reason="parse"}')
    with connected(gateway) as connection:
        connection.sendall(sent)
        answer = parse(read_to_end(connection))
    assert (answer.status, answer.error["type"], answer.rest) == (400, "invalid_request_error", b"")
    assert answer.headers["connection"] == "close"
    assert metric_of(gateway, 'yardstick_rejected_requests_total{reason="parse"}') == counted + 1


# --- sizes


def test_the_bound_on_headers_is_exact(gateway: Program) -> None:
    fixed = len(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: \r\n\r\n")
    for length, status in ((65536, 200), (65537, 431)):
        sent = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: %b\r\n\r\n" % (b"y" * (length - fixed))
        assert len(sent) == length
        for size in (length, 1000):
            with connected(gateway) as connection, suppress(OSError):
                for start in range(0, length, size):
                    connection.sendall(sent[start : start + size])
                answer = read_answer(connection)
                assert answer.status == status
                if status == 431:
                    assert answer.error["code"] == "headers_too_large"
                    assert answer.headers["connection"] == "close"


START = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
LONG, MANY = b"y" * 100_000, b"x: %b\r\n" % (b"y" * 10_000)
FLOODS = {
    "many headers": (START, MANY, 200_000_000, [431]),
    "one header": (START + b"x: ", LONG, 200_000_000, [431]),
    "a header's name": (START, LONG, 200_000_000, [431]),
    "the path": (b"GET /", LONG, 200_000_000, [431]),
    "an extension of a chunk": (CHUNKED + b"1;x=", LONG, 50_000_000, [400, 431]),
    "a trailer": (CHUNKED + b"1\r\n{\r\n0\r\nx: ", LONG, 50_000_000, [400, 431]),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", MANY, 50_000_000, [400, 431]),
    "extensions": (CHUNKED, b"1;x=%b\r\n{\r\n" % (b"y" * 1000), 50_000_000, [400, 431]),
}
"""Beginning, what follows again and again, bytes, and statuses of the answer."""


@pytest.mark.alone
@pytest.mark.waits
@pytest.mark.parametrize(("start", "more", "size", "statuses"), FLOODS.values(), ids=FLOODS.keys())
def test_what_is_no_content_is_bounded_and_not_kept(
    gateway: Program, start: bytes, more: bytes, size: int, statuses: list[int]
) -> None:
    with Watch(gateway) as watch, connected(gateway) as connection:
        received = flood(connection, start, more, size)
        time.sleep(0.2)
    assert parse(received).status in statuses
    assert watch.grown_mib < 5
    assert watch.slowest_livez < 1


def flood(connection: socket.socket, start: bytes, more: bytes, size: int) -> bytes:
    """Send up to ``size`` bytes and return what comes back, even if the other side has closed before the end."""
    with suppress(OSError):
        connection.sendall(start)
        for _ in range(size // len(more)):
            connection.sendall(more)
    return read_to_end(connection)


def test_too_many_headers(gateway: Program) -> None:
    for count, status in ((127, 200), (128, 431)):
        with connected(gateway) as connection:
            headers = b"".join(b"x-%d: y\r\n" % index for index in range(count))
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
            assert read_answer(connection).status == status


@pytest.mark.alone
@pytest.mark.waits
def test_tiny_chunks_are_read_and_do_not_block(gateway: Program) -> None:
    body = b" " * 200_000 + SCORE
    sent = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with Watch(gateway) as watch:
        for _ in range(3):
            with connected(gateway) as connection:
                connection.sendall(CHUNKED + sent)
                assert read_answer(connection).status == 200
    assert watch.slowest_livez < 0.5
    assert watch.grown_mib < 10


def test_a_body_that_is_refused_early_does_not_reset_the_connection(gateway: Program) -> None:
    """The client sends everything before it reads: it still gets the answer."""
    with connected(gateway) as connection:
        connection.sendall(request("/v1/score", b"x" * (33 << 20)))
        answer = parse(read_to_end(connection))
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (413, "request_too_large", "close")


def test_a_refused_body_is_not_asked_for(gateway: Program) -> None:
    for length, status in ((1 << 40, b"413"), (10, b"100")):
        with connected(gateway) as connection:
            connection.sendall(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length)
            assert connection.recv(1000).split()[1] == status


# --- times


@pytest.mark.parametrize("sent", [b"G", START + b"x: ", request("/v1/score", b"{", content_length="100"), CHUNKED + b"1\r\n{\r\n"])
def test_headers_and_bodies_that_do_not_come(gateway: Program, sent: bytes) -> None:
    route = 'yardstick_requests_total{model="",route="/v1/score",status="408"}'
    counted = metric_of(gateway, route)
    with connected(gateway) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        answer = parse(read_to_end(connection))
        took = time.monotonic() - began
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "request_timeout", "close")
    assert SECONDS <= took < SECONDS + 2
    assert metric_of(gateway, route) == counted + sent.startswith(b"POST")


def test_headers_that_come_byte_by_byte(gateway: Program) -> None:
    with connected(gateway) as connection:
        began = time.monotonic()
        with suppress(OSError):
            for byte in itertools.cycle(b"a"):
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - began < SECONDS + 3
    assert time.monotonic() - began >= SECONDS


def test_connections_without_a_request_are_closed(gateway: Program) -> None:
    with connected(gateway) as silent, connected(gateway) as used:
        began = time.monotonic()
        used.sendall(request("/livez", method="GET"))
        assert read_answer(used).status == 200
        assert read_to_end(silent) == b""
        assert SECONDS <= time.monotonic() - began < SECONDS + 1.5
        assert read_to_end(used) == b""
        assert 2 * SECONDS <= time.monotonic() - began < 2 * SECONDS + 2


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n" + SCORE,
        b'POST /v1/score HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"que\r\n',
        b"POST /v1/score HTTP/1.1\r\nhost: local",
    ],
    ids=["length", "chunks", "headers"],
)
def test_a_client_that_ends_its_request_too_early_is_told_so(gateway: Program, sent: bytes) -> None:
    """It closes its side of the connection and waits for the answer."""
    with connected(gateway) as connection:
        connection.sendall(sent)
        time.sleep(0.1)
        began = time.monotonic()
        connection.shutdown(socket.SHUT_WR)
        answer = parse(read_to_end(connection))
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert "ended" in answer.error["message"]
        assert time.monotonic() - began < 0.5 * SECONDS


@pytest.mark.alone
@pytest.mark.waits
def test_a_body_may_be_slow_but_not_too_slow(gateway: Program) -> None:
    body = b" " * 60_000 + SCORE
    for size, status in ((3000, 200), (500, 408)):  # each twentieth of a second
        with connected(gateway) as connection:
            connection.sendall(request("/v1/score", b"", content_length=str(len(body))))
            with suppress(OSError):
                for start in range(0, len(body), size):
                    connection.sendall(body[start : start + size])
                    time.sleep(0.05)
            assert parse(read_to_end(connection) if status == 408 else received(connection)).status == status


def received(connection: socket.socket) -> bytes:
    answer = read_answer(connection)
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (answer.status, len(answer.body)) + answer.body


def test_a_stream_that_is_not_read_ends_with_its_work(gateway: Program, engine: FakeEngine) -> None:
    body = json.dumps({**ENDLESS, "max_tokens": 1000, "logprobs": 20, "stream": True}).encode()  # ten seconds, 10 MB
    left = len(engine.left)
    with slow(engine, 0.01), connected(gateway, receive_buffer=4096) as connection:
        connection.sendall(request("/v1/completions", body))
        wait_until(lambda: len(engine.left) > left, 8)
        wait_until(lambda: metric_of(gateway, "yardstick_open_connections") <= 2, 3)


# --- connections


@pytest.mark.alone
@pytest.mark.waits
@pytest.mark.slow
def test_idle_connections_cost_little(start_gateway: StartGateway) -> None:
    gateway = start_gateway(header_seconds=60)
    before = settled_mib(gateway.process.pid)
    with ExitStack() as stack:
        for index in range(450):
            connection = stack.enter_context(connected(gateway))
            connection.sendall([b"", b"GET /livez HTTP/1.1\r\nhost: loc", request("/livez", method="GET")][index % 3])
        wait_until(lambda: metric_of(gateway, "yardstick_open_connections") >= 450)
        assert gateway.client.get("/livez").elapsed.total_seconds() < 1
        grown = tree_mib(gateway.process.pid) - before
    assert grown < 15, "about 30 KiB a connection"
    wait_until(lambda: metric_of(gateway, "yardstick_open_connections") <= 2)


@pytest.mark.slow
def test_many_connections_lock_nobody_out(start_gateway: StartGateway, engine: FakeEngine) -> None:
    gateway = start_gateway(max_connections=8)
    with ExitStack() as stack:
        loris = [stack.enter_context(connected(gateway)) for _ in range(30)]
        for connection in loris:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ")
        for _ in range(5):
            assert httpx.get(f"{gateway.url}/livez").status_code == 200
        assert metric_of(gateway, "yardstick_open_connections") <= 8
        with slow(engine):
            for connection in loris:
                connection.close()
            work = request("/v1/completions", json.dumps(ENDLESS).encode())
            running = len(engine.running)
            gateway.client.close()
            gateway.client = httpx.Client(base_url=gateway.url, timeout=20)
            for _ in range(8):
                stack.enter_context(connected(gateway)).sendall(work)
            wait_until(lambda: len(engine.running) == running + 8)
            with connected(gateway) as refused:
                refused.sendall(request("/livez", method="GET"))
                answer: Answer = parse(read_to_end(refused))
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "overloaded", "1")
    wait_until(lambda: not engine.running, 5)
    assert gateway.client.get("/livez").status_code == 200


def test_big_events_reach_a_slow_reader(gateway: Program, engine: FakeEngine) -> None:
    """A reader that is slow but reads is not cut off."""
    engine.says, engine.tokens_per_delta = ids("red blue ") * 40, 50
    try:
        body = json.dumps({"prompt": [1], "max_tokens": 120, "logprobs": 20, "n": 4}).encode()
        with connected(gateway, receive_buffer=4096) as connection:
            connection.sendall(request("/v1/completions", body, connection="close"))
            whole = b""
            while part := connection.recv(2048):
                whole += part
                time.sleep(0.005)
        assert len(json.loads(parse(whole).body)["choices"]) == 4
    finally:
        engine.says, engine.tokens_per_delta = None, 1
