"""Streams that wait: comments keep them open, and errors still reach their clients."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.answers import asking
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire

COMMENT = ": keep-alive"


def lines_of(client: httpx.Client, **body: Any) -> list[str]:
    """Everything in a stream but empty lines."""
    answer = client.post("/v1/completions", json={"prompt": "x", "stream": True} | body)
    assert answer.status_code == 200
    return [line for line in answer.text.splitlines() if line]


@pytest.mark.alone  # where other tests hold the gateway up for 0.3 s, a comment stands elsewhere too
@pytest.mark.parametrize("after", [0, 3])
def test_comments_while_nothing_comes(start: Start, after: int) -> None:
    engine = FakeEngine(says=ids("red shoes, blue table"))
    engine.faults.pause_after, engine.faults.pause = after, 1.2
    lines = lines_of(start(engine, keepalive_seconds=0.3))
    places = [place for place, line in enumerate(lines) if line == COMMENT]
    assert 3 <= len(places) <= 10
    assert places == list(range(places[0], places[0] + len(places))), "at one place"
    assert (places[0] == 0) == (after == 0)
    events = [line.removeprefix("data: ") for line in lines if line != COMMENT]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "red shoes, blue table"


@pytest.mark.slow
def test_an_error_has_its_own_status_until_the_first_comment(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, keepalive_seconds=1.5)
    engine.faults.fail = wire.Failed("", "internal", "broken")
    engine.faults.delay = 0.1
    assert client.post("/v1/completions", json={"prompt": "x", "stream": True}).status_code == 500
    assert metric(client, 'yardstick_broken_streams_total{code="internal_error",model="fake"}') == 0
    engine.faults.delay = 2.5
    *comments, last = lines_of(client)
    assert set(comments) == {COMMENT}
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert metric(client, 'yardstick_broken_streams_total{code="internal_error",model="fake"}') == 1
    assert metric(client, 'yardstick_requests_total{model="fake",route="/v1/completions",status="500"}') == 1


@pytest.mark.parametrize("after", [0, 2])
def test_a_client_that_leaves_while_it_waits(start: Start, after: int) -> None:
    engine = FakeEngine(says=ids("red shoes, blue table"))
    engine.faults.pause_after, engine.faults.pause = after, 30
    client = start(engine, keepalive_seconds=0.1)
    with asking(client, "/v1/completions", {"prompt": "x", "stream": True}) as connection:
        received = b""
        while received.count(COMMENT.encode()) < 2:
            chunk = connection.recv(1000)
            assert chunk, received
            received += chunk
    wait_until(lambda: len(engine.left) == 1, seconds=10)
    wait_until(lambda: metric(client, "yardstick_requests_in_flight") == 0)
    assert "yardstick_broken_streams_total{" not in client.get("/metrics").text
