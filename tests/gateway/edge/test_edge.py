"""Parts of the HTTP edge by themselves; tests/attacks/ has the whole."""

from __future__ import annotations

import gzip
import socket
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.edge.inflate import PIECE, Inflater
from gateway.edge.protocol import Protocol, protocol_factory
from gateway.edge.transport import GATHER_BYTES, GatheringTransport
from gateway.errors import InvalidRequest
from gateway.ops.metrics import Telemetry
from gateway.settings import Settings
from tests.fakes import FakeEngine
from tests.gateway.conftest import Start
from tests.tuned import tuned


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 20_000)), max_size=12),
    st.sampled_from([(b"gzip", gzip.compress), (b"deflate", zlib.compress)]),
    st.integers(1, 3000),
)
def test_whatever_is_compressed_is_inflated_in_small_pieces(
    parts: list[tuple[bytes, int]], coding: tuple[bytes, Callable[[bytes], bytes]], step: int
) -> None:
    plain = b"".join(text * count for text, count in parts)
    packed = coding[1](plain)
    inflater, found = Inflater(coding[0]), b""
    for start in range(0, len(packed), step):
        for piece in inflater.feed(packed[start : start + step]):
            assert len(piece) <= PIECE
            found += piece
    inflater.end()
    assert found == plain


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_body_is_never_taken_for_a_whole_one(plain: bytes, place: int, byte: int) -> None:
    packed = bytearray(gzip.compress(plain, mtime=0))
    damaged = bytes(packed[:place]) + bytes([byte]) + bytes(packed[place + 1 :])
    inflater = Inflater(b"gzip")
    try:
        found = b"".join(inflater.feed(damaged))
        inflater.end()
    except InvalidRequest:
        return
    assert found == plain  # a field of the header that means nothing


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


def gathering() -> tuple[GatheringTransport, Inner, Loop]:
    inner, loop = Inner(), Loop()
    return GatheringTransport(inner, loop, lambda: inner.written.append(b"<close>")), inner, loop  # type: ignore[arg-type]


def test_writes_of_one_turn_are_one() -> None:
    transport, inner, loop = gathering()
    transport.write(b"a")
    transport.write(b"b")
    assert inner.written == []
    loop.turn()
    transport.write(b"c")
    transport.close()
    loop.turn()
    assert inner.written == [b"ab", b"c", b"<close>"]


def test_much_is_written_at_once() -> None:
    transport, inner, loop = gathering()
    for _ in range(3):
        transport.write(b"x" * GATHER_BYTES)
    assert len(inner.written) == 1, "so that the transport can ask for a pause"
    loop.turn()
    assert sum(map(len, inner.written)) == 3 * GATHER_BYTES


@given(st.lists(st.sampled_from(["pause", "resume", "hold", "release"])))
def test_reading_goes_on_when_nobody_objects(steps: list[str]) -> None:
    transport, inner, _ = gathering()
    paused = held = False
    for step in steps:
        if step == "pause" and not paused:
            transport.pause_reading()
            paused = True
        elif step == "resume" and paused:
            transport.resume_reading()
            paused = False
        elif step in ("hold", "release"):
            getattr(transport, step)()
            held = step == "hold"
        assert inner.reading == (not paused and not held)


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
