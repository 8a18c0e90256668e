"""A gateway that is told to end: not ready at once, serving on for a while, then gone, and no answer cut off."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest

from gateway.settings import Settings, SettingsError
from tests.fakes import FakeEngine, served
from tests.processes import Program, wait_until

STREAM = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}
SCORE = {"query": "a", "items": ["b"], "label_token_ids": [1]}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    with served(engine) as url:
        engine.url = url
        yield engine


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start_gateway(**settings: str) -> Program:
        environment = {f"YARDSTICK_{name.upper()}": value for name, value in settings.items()}
        programs.append(Program("gateway", "--engine", engine.url, **environment))
        return programs[-1].wait_ready()

    yield start_gateway
    for program in programs:
        program.close()


def reading(gateway: Program, lines: list[str]) -> threading.Thread:
    """Read a stream into ``lines``, as much as comes of it."""

    def read() -> None:
        with suppress(httpx.TransportError), httpx.stream("POST", f"{gateway.url}/v1/completions", json=STREAM) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_not_ready_at_once_but_serving_until_the_drain_is_over(start: Callable[..., Program]):
    gateway = start(drain_seconds="1.5", grace_seconds="10")
    assert "connection" not in gateway.client.get("/livez").headers
    began = time.monotonic()
    gateway.process.send_signal(signal.SIGTERM)
    wait_until(lambda: gateway.client.get("/readyz").status_code == 503, 1)
    while time.monotonic() - began < 1.2:
        answer = gateway.client.post("/v1/score", json=SCORE)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        time.sleep(0.05)
    assert gateway.process.wait(5) == 0
    assert time.monotonic() - began > 1.5
    with pytest.raises(httpx.ConnectError):
        gateway.client.get("/livez")


def test_a_stream_is_finished(engine: FakeEngine, start: Callable[..., Program]):
    gateway = start(drain_seconds="0.2", grace_seconds="20")
    engine.faults.delay = 0.05
    lines: list[str] = []
    thread = reading(gateway, lines)
    wait_until(lambda: len(engine.generates) > 0)
    gateway.process.send_signal(signal.SIGTERM)
    thread.join(10)
    assert lines[-2] == "data: [DONE]"
    assert gateway.process.wait(10) == 0


def test_a_stream_that_takes_too_long_is_cut_off(engine: FakeEngine, start: Callable[..., Program]):
    gateway = start(drain_seconds="0.1", grace_seconds="1")
    engine.faults.delay = 2
    reading(gateway, [])
    wait_until(lambda: len(engine.generates) > 0)
    began = time.monotonic()
    gateway.process.send_signal(signal.SIGTERM)
    gateway.process.wait(10)
    assert time.monotonic() - began < 5


def test_a_drain_must_fit_into_the_grace():
    with pytest.raises(SettingsError, match="YARDSTICK_DRAIN_SECONDS: 30 s leave nothing of the 30 s"):
        Settings(engines=("http://127.0.0.1:1",), drain_seconds=30, grace_seconds=30)
