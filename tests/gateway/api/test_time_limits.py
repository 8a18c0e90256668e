"""Time limits that clients set: at the limit the answer is an error, and the engine's work ends."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway import answers
from tests.processes import wait_until

SCORE = {"query": [5, 6], "items": [[7], [8]], "label_token_ids": [3]}
TEXT = {"prompt": [5, 6], "max_tokens": 50, "ignore_eos": True}
OURS = "x-yardstick-timeout"
SDK = "x-stainless-read-timeout"


@pytest.fixture
def slow(engine: FakeEngine) -> FakeEngine:
    """An engine that takes seconds for every request."""
    engine.faults.delay = 0.1
    engine.says = [5] * 50
    return engine


@pytest.mark.parametrize(("path", "body"), [("score", SCORE), ("completions", TEXT)])
@pytest.mark.parametrize(("header", "field"), [(OURS, None), (SDK, None), ("x-stainless-timeout", None), (None, "timeout")])
def test_a_request_ends_at_its_limit(
    slow: FakeEngine, client: httpx.Client, path: str, body: dict[str, Any], header: str | None, field: str | None
) -> None:
    slow.faults.hold, slow.faults.delay = True, 5.0
    began = time.monotonic()
    answer = client.post(
        f"/v1/{path}",
        json=body | ({field: 0.3} if field else {}),
        headers={"cache-control": "no-store", **({header: "0.3"} if header else {})},
    )
    assert 0.3 <= time.monotonic() - began < 2
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "within 0.3 s" in answer.json()["error"]["message"]
    assert "x-request-id" in answer.headers
    wait_until(lambda: not slow.running)
    assert slow.left, "the engine was told"


@pytest.mark.parametrize(("headers", "fields"), [({OURS: "0.0001"}, {}), ({SDK: "1e-9"}, {}), ({}, {"timeout": 1e-320})])
def test_a_limit_that_passes_at_once_is_no_fault(
    slow: FakeEngine, client: httpx.Client, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    for path, body in (
        ("completions", TEXT),
        ("score", SCORE),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = client.post(f"/v1/{path}", json=body | fields, headers={"cache-control": "no-store"} | headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def events(client: httpx.Client, headers: dict[str, str], **fields: Any) -> list[dict[str, Any]]:
    return answers.events(client.post("/v1/completions", json=TEXT | {"stream": True} | fields, headers=headers))


@pytest.mark.parametrize(("headers", "fields"), [({OURS: "0.5"}, {}), ({}, {"timeout": 0.5})])
def test_a_stream_ends_with_an_error_at_its_limit(
    slow: FakeEngine, client: httpx.Client, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    *some, last = events(client, headers, **fields)
    assert some
    assert last["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: not slow.running)
    assert slow.left


def test_the_time_in_which_an_sdk_waits_for_bytes_does_not_end_a_stream(slow: FakeEngine, client: httpx.Client) -> None:
    slow.faults.delay = 0.02
    found = events(client, {SDK: "0.5"})
    assert "error" not in found[-1]
    assert found[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "86401", "1e99"])
def test_limits_that_are_none_are_refused(engine: FakeEngine, client: httpx.Client, value: str) -> None:
    answer = client.post("/v1/score", json=SCORE, headers={OURS: value})
    assert answer.status_code == 400
    assert OURS in answer.json()["error"]["message"]
    assert client.post("/v1/score", json=SCORE, headers={SDK: value}).status_code == 200, "what an SDK sends harms nobody"


@pytest.mark.parametrize("value", [0, -1, 1e6, "soon"])
def test_a_field_that_is_no_limit_is_refused(engine: FakeEngine, client: httpx.Client, value: Any) -> None:
    answer = client.post("/v1/score", json=SCORE | {"timeout": value})
    assert answer.status_code == 400
    assert "timeout" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "fields", "most"),
    [
        ({}, {}, 600),
        ({OURS: "20"}, {}, 21),
        ({SDK: "30"}, {}, 31),
        ({OURS: "20", SDK: "30"}, {"timeout": 25}, 26),
        ({OURS: "5000"}, {}, 600),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("score", SCORE), ("completions", TEXT)])
def test_engines_are_told_when_nobody_waits_any_more(
    engine: FakeEngine,
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    fields: dict[str, Any],
    most: float,
) -> None:
    """A second after the limit, so that the gateway ends the request first, and after ``engine_seconds`` at the latest."""
    headers = headers | {"cache-control": "no-store"}
    assert client.post(f"/v1/{path}", json=body | fields, headers=headers).status_code == 200
    (message,) = [*engine.scores, *engine.generates]
    assert message.deadline is not None
    assert most / 2 < message.deadline <= most + 0.01, "the event loop's clock counts milliseconds"


def test_the_next_request_of_a_connection_has_its_own_limit(engine: FakeEngine, client: httpx.Client) -> None:
    for headers in ({OURS: "20"}, {}):
        client.post("/v1/completions", json=TEXT | {"max_tokens": 1}, headers=headers)
    deadlines = [message.deadline for message in engine.generates]
    assert [deadline is not None and deadline > 22 for deadline in deadlines] == [False, True]
