"""Admission under attack: slow uploads, floods and large bodies of one key take nothing from another."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.attacks.conftest import StartGateway
from tests.attacks.raw import connected, parse, read_answer, read_to_end, request
from tests.attacks.watch import Watch, metric_of, settled_mib
from tests.fakes import FakeEngine
from tests.gateway.keys import entry, write
from tests.processes import Program, wait_until

MEBIBYTE = 1 << 20
SCORE = {"query": [1], "items": [[2]], "label_token_ids": [1]}
HEAVY = json.dumps({"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
PLACES = 8
ONE_KEY = 7
"""Places of ``PLACES`` that one busy key gets: after k, it may hold k + 1 <= 4 * (PLACES - k)."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("keys") / "keys.json", *map(entry, "abc"))


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, keys: Path) -> Program:
    return start_gateway(
        api_keys_file=keys,
        max_in_flight=PLACES,
        max_uploads=PLACES,
        max_body_bytes=MEBIBYTE,
        max_bytes_in_flight=4 * MEBIBYTE,
        body_seconds=8,
    )


@pytest.fixture(autouse=True)
def nothing_is_left(gateway: Program) -> Iterator[None]:
    """Whatever a test does, all room is free again when its connections are closed."""
    yield
    wait_until(lambda: metric_of(gateway, "yardstick_bytes_in_flight") == metric_of(gateway, "yardstick_uploads") == 0, 5)


@contextmanager
def uploads(gateway: Program, key: str, sent: list[bytes]) -> Iterator[list[socket.socket]]:
    """Connections on each of which a part of a request is sent."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(gateway)) for _ in sent]
        for connection, part in zip(connections, sent, strict=True):
            connection.sendall(part)
        for _ in range(10):  # turns of the event loop, which has read all parts then
            gateway.client.get("/livez")
        yield connections


def head(key: str, length: int, **headers: str) -> bytes:
    return request("/v1/score", authorization=f"Bearer {key}", content_length=str(length), **headers)


def score(gateway: Program, key: str, **more: object) -> httpx.Response:
    return gateway.client.post("/v1/score", json=SCORE | more, headers={"authorization": f"Bearer {key}"})


def refusals(connections: list[socket.socket]) -> int:
    """How many of ``connections`` were answered, each with 429 ``overloaded``."""
    count = 0
    for connection in connections:
        connection.settimeout(0.01)
        try:
            connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
        answer = read_answer(connection)  # head and body may arrive one after the other
        assert (answer.status, answer.error["code"], answer.headers["connection"]) == (429, "overloaded", "close")
        assert answer.headers["retry-after"] == "1"
        count += 1
    return count


def test_uploads_are_not_requests_in_flight(gateway: Program) -> None:
    """The review's attack: a few slow uploads of one key, and every other key got 429."""
    with uploads(gateway, "a", [head("a", 100) + b"{"] * ONE_KEY) as connections:
        assert refusals(connections) == 0
        for key in "bc":  # a request of "a" is an upload itself until its body is complete
            assert score(gateway, key).status_code == 200
        for connection in connections:
            connection.sendall(b" " * 99)
            assert read_answer(connection).status == 400


def test_uploads_of_one_key_leave_room_for_others(gateway: Program) -> None:
    with uploads(gateway, "a", [head("a", 100) + b"{"] * 30) as connections:
        assert refusals(connections) == 30 - ONE_KEY
        assert metric_of(gateway, "yardstick_uploads") == ONE_KEY
        with uploads(gateway, "b", [head("b", 100) + b"{"]) as others:
            assert refusals(others) == 0
        assert score(gateway, "b").status_code == 200
        with connected(gateway) as whole:  # in one packet: it is no upload
            whole.sendall(request("/v1/score", json.dumps(SCORE).encode(), authorization="Bearer a"))
            assert read_answer(whole).status == 200
    assert metric_of(gateway, 'yardstick_rejected_requests_total{reason="uploads"}') >= 30 - ONE_KEY


def test_a_flood_of_one_key_leaves_room_for_others(gateway: Program, engine: FakeEngine) -> None:
    engine.faults.delay = 0.1
    try:
        flood = request("/v1/completions", HEAVY, authorization="Bearer a")
        with uploads(gateway, "a", [flood] * 30):
            wait_until(lambda: len(engine.running) == ONE_KEY)
            assert score(gateway, "b").status_code == 200
            refused = score(gateway, "a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert "connection" not in refused.headers, "its body had arrived"
            other = request("/v1/completions", HEAVY, authorization="Bearer b")
            with uploads(gateway, "b", [other]):
                wait_until(lambda: len(engine.running) == PLACES)
            assert metric_of(gateway, 'yardstick_rejected_requests_total{reason="in_flight"}') >= 30 - ONE_KEY
    finally:
        engine.faults.delay = 0
    wait_until(lambda: not engine.running)
    assert score(gateway, "a").status_code == 200


def test_announced_bytes_are_reserved(gateway: Program) -> None:
    """One key gets at most four fifths of 4 MiB, rounded up to its bodies."""
    with uploads(gateway, "a", [head("a", MEBIBYTE // 2)] * 8) as connections:
        held = metric_of(gateway, "yardstick_bytes_in_flight")
        assert 2.5 * MEBIBYTE <= held <= 3.5 * MEBIBYTE
        assert refusals(connections) == 8 - held / (MEBIBYTE // 2)
        assert score(gateway, "b", items=[[2] * 500] * 100).status_code == 200
        answer = score(gateway, "a", items=[[2] * 500] * 800)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert "use all memory" in answer.json()["error"]["message"]


def test_chunks_are_reserved_as_they_arrive(gateway: Program) -> None:
    start = b"POST /v1/score HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"%x\r\n%b\r\n" % (MEBIBYTE // 2, b" " * (MEBIBYTE // 2))
    with uploads(gateway, "a", [start] * 7) as connections:
        assert metric_of(gateway, "yardstick_bytes_in_flight") == 0
        for connection in connections[:3]:
            connection.sendall(part)
        wait_until(lambda: metric_of(gateway, "yardstick_bytes_in_flight") == 1.5 * MEBIBYTE)
        for connection in connections[3:]:
            connection.sendall(part)
        wait_until(lambda: refusals(connections) >= 1)
        assert metric_of(gateway, "yardstick_bytes_in_flight") <= 3.5 * MEBIBYTE


def test_a_refused_upload_gets_its_answer(gateway: Program) -> None:
    """Although the client sends everything before it reads."""
    with uploads(gateway, "a", [head("a", MEBIBYTE)] * 4), connected(gateway) as late:
        late.sendall(head("a", MEBIBYTE) + b" " * MEBIBYTE)
        assert parse(read_to_end(late)).status == 429


@pytest.mark.slow
def test_without_keys_all_room_is_used(start_gateway: StartGateway, engine: FakeEngine) -> None:
    gateway = start_gateway(max_in_flight=PLACES, max_uploads=PLACES)
    with uploads(gateway, "", [head("x", 100) + b"{"] * 12) as connections:
        assert refusals(connections) == 12 - PLACES
        with connected(gateway) as whole:  # in one packet: it is no upload
            whole.sendall(request("/v1/score", json.dumps(SCORE).encode()))
            assert read_answer(whole).status == 200
    engine.faults.delay = 0.1
    try:
        with uploads(gateway, "", [request("/v1/completions", HEAVY)] * 12):
            wait_until(lambda: len(engine.running) == PLACES)
    finally:
        engine.faults.delay = 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("chunked", [False, True])
def test_many_large_uploads_cost_no_more_than_their_bound(start_gateway: StartGateway, chunked: bool) -> None:
    """Forty clients send up to 20 MiB each: memory stays near ``max_bytes_in_flight``."""
    gateway = start_gateway(max_bytes_in_flight=32 * MEBIBYTE)
    start = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\n"
    start += b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % (20 * MEBIBYTE)
    part = b" " * (MEBIBYTE // 2)
    part = b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
    settled_mib(gateway.process.pid)
    with Watch(gateway) as watch, ExitStack() as stack:
        connections = [stack.enter_context(connected(gateway, timeout=1)) for _ in range(40)]
        for connection in connections:
            connection.sendall(start)
        open_ones = set(connections)
        for _ in range(8):
            for connection in list(open_ones):
                try:
                    connection.sendall(part)
                except OSError:
                    open_ones.discard(connection)
    assert watch.grown_mib < 32 + 48, "the bodies, and the buffers of the connections"
    assert watch.slowest_livez < 2
