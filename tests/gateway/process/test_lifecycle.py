"""A gateway after SIGTERM: at once not ready, still serving for a while, then gone; no answer is cut off."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, served
from tests.processes import Program, wait_until
from tests.tuned import environment

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

    def start_gateway(**settings: Any) -> Program:
        programs.append(Program("tests.tuned", "--engine", engine.url, **environment(settings)))
        return programs[-1].wait_ready()

    yield start_gateway
    for program in programs:
        program.close()


def reading(gateway: Program, lines: list[str], body: dict[str, Any] = STREAM) -> threading.Thread:
    """Read a stream into ``lines``, as much as comes of it."""

    def read() -> None:
        with suppress(httpx.TransportError), httpx.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_not_ready_at_once_but_serving_until_the_drain_is_over(engine: FakeEngine, start: Callable[..., Program]):
    """And a stream is finished."""
    gateway = start(drain_seconds="2.5", grace_seconds="20")
    assert "connection" not in gateway.client.get("/livez").headers
    engine.faults.delay = 0.1
    lines: list[str] = []
    thread = reading(gateway, lines)
    wait_until(lambda: len(engine.generates) > 0)
    began = time.monotonic()
    gateway.process.send_signal(signal.SIGTERM)
    wait_until(lambda: gateway.client.get("/readyz").status_code == 503, 3)
    while time.monotonic() - began < 1:
        answer = gateway.client.post("/v1/score", json=SCORE)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        time.sleep(0.05)
    thread.join(10)
    assert lines[-2] == "data: [DONE]"
    assert gateway.process.wait(30) == 0
    assert time.monotonic() - began > 2.5
    with pytest.raises(httpx.ConnectError):
        gateway.client.get("/livez")


@pytest.mark.slow
def test_open_requests_are_told_at_the_end_of_the_grace_period(engine: FakeEngine, start: Callable[..., Program]):
    """A stream that has begun gets a last event; what has not begun gets a 503. With comments, a stream that waits has begun."""
    gateway = start(drain_seconds="0.1", grace_seconds="2", keepalive_seconds=0.2)
    engine.faults.delay = 0.05
    engine.says = ids("red") * 400
    endless = STREAM | {"max_tokens": 400}
    lines: list[str] = []
    answers: list[httpx.Response] = []

    def ask(body: dict[str, Any]) -> None:
        answers.append(httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20))

    threads = [reading(gateway, lines, endless)]
    wait_until(lambda: len(lines) > 4)
    engine.faults.pause_after, engine.faults.pause = 0, 60
    for body in (endless, endless | {"stream": False}):
        threads.append(threading.Thread(target=ask, args=(body,)))
        threads[-1].start()
    wait_until(lambda: len(engine.generates) == 3)
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(30) == 0  # half of the pause of the engine
    for thread in threads:
        thread.join(5)
    errors = [json.loads(lines[-2].removeprefix("data: "))]
    for answer in answers:
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        assert streamed == json.loads(answer.request.content)["stream"]
        if not streamed:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-request-id"]
        errors.append(json.loads(answer.text.splitlines()[-2].removeprefix("data: ")) if streamed else answer.json())
    assert [error["error"]["code"] for error in errors] == ["server_shutting_down"] * 3
    wait_until(lambda: len(engine.left) == 3)
