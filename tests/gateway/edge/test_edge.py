"""Parts of the HTTP edge by themselves; tests/attacks/ has the whole."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.http.connection import Protocol, protocol_factory
from gateway.ops.metrics import Telemetry
from gateway.settings import Settings
from tests.fakes import FakeEngine
from tests.gateway.conftest import Start
from tests.tuned import tuned


class Inner:
    """A transport that records."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reading = True
        self.unwritten = 0
        self.closed = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.reading, "uvloop raises where it is paused already"
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Loop:
    """An event loop's ``call_soon``."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Clock(Loop):
    """An event loop whose time a test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Nobody sweeps."""


@pytest.fixture
def connection() -> Iterator[tuple[Protocol, Inner, Clock, Telemetry]]:
    """A connection on a transport that a test controls, by a clock that it tells."""
    telemetry, inner, clock = Telemetry(), Inner(), Clock()
    settings = Settings(engines=("http://127.0.0.1:1",), idle_seconds=30)
    config = uvicorn.Config(lambda *_: None, log_config=None)
    make = protocol_factory(settings, telemetry, None)
    protocol = make(config=config, server_state=ServerState(), app_state={}, _loop=clock)
    with tuned({"write_seconds": 10}):
        protocol.connection_made(inner)
        yield protocol, inner, clock, telemetry


def write_timeouts(telemetry: Telemetry) -> bool:
    return b'yardstick_rejected_requests_total{reason="write_timeout"} 1.0' in b"".join(telemetry.exposition())


def test_a_client_that_does_not_read_is_left(connection: tuple[Protocol, Inner, Clock, Telemetry]) -> None:
    protocol, inner, clock, telemetry = connection
    inner.unwritten = 100_000
    protocol.pause_writing()
    protocol.check_deadlines(9)
    assert not inner.aborted
    clock.now = 11
    protocol.check_deadlines(11)
    assert inner.aborted
    assert write_timeouts(telemetry)


def test_a_client_that_reads_slowly_is_kept(connection: tuple[Protocol, Inner, Clock, Telemetry]) -> None:
    protocol, inner, clock, telemetry = connection
    inner.unwritten = 100_000
    protocol.pause_writing()
    for clock.now in (9.0, 11.0, 20.0, 22.0):
        inner.unwritten -= 1
        protocol.check_deadlines(clock.now)
    protocol.resume_writing()
    clock.now = 29
    protocol.check_deadlines(29)
    assert not inner.aborted
    assert not write_timeouts(telemetry)


def test_what_is_left_when_a_connection_closes_must_be_read(connection: tuple[Protocol, Inner, Clock, Telemetry]) -> None:
    protocol, inner, clock, telemetry = connection
    inner.unwritten = 1000
    protocol.shutdown()
    assert inner.closed
    clock.now = 11
    protocol.check_deadlines(11)
    assert inner.aborted
    assert write_timeouts(telemetry)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/score"])
def test_a_body_that_nobody_reads_ends_the_connection(start: Start, path: str) -> None:
    """Where the answer comes before the body: otherwise the rest of the body would have to be read."""
    engine = FakeEngine()
    client = start(engine, max_body_bytes=1000)
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\nx".encode())
        received = b""
        while part := connection.recv(1000):
            received += part
    assert b"connection: close" in received
    assert received.split()[1] == (b"413" if path == "/v1/score" else b"404")


def test_bodies_of_get_requests_do_no_harm(start: Start) -> None:
    engine = FakeEngine()
    client: httpx.Client = start(engine)
    for _ in range(3):
        assert client.request("GET", "/v1/models", content=b"x" * 100).status_code == 200
