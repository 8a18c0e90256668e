"""Streams: the same text in pieces, errors before and after the first event, clients that leave."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway import answers
from tests.gateway.answers import asking
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire

EMOJI = "a 🦊 naïve 👩‍👩‍👧 東京 fox"


def events(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    return answers.events(client.post(f"/v1/{path}", json={"stream": True, **body}))


def texts(told: list[Any]) -> dict[int, str]:
    """The joined text of each choice."""
    joined: dict[int, str] = {}
    for event in told:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 3},
        {"stop": ["fox", "e 👩"]},
        {"logprobs": 2},
        {"logprobs": 1, "echo": True, "n": 2},
        {"logprobs": 0, "stop": "東", "include_stop_str_in_output": True},
    ],
)
def test_a_stream_is_the_answer_in_pieces(
    client: httpx.Client, engine: FakeEngine, extra: dict[str, Any], tokens_per_delta: int
) -> None:
    engine.says = ids(EMOJI)
    engine.tokens_per_delta = tokens_per_delta
    engine.faults.delay = 0.002
    body = {"prompt": "The 🦊", "max_tokens": 100, **extra}
    whole = client.post("/v1/completions", json=body).json()
    told = events(client, "completions", **body, stream_options={"include_usage": True})
    assert told[-1]["usage"] == whole["usage"]
    assert texts(told) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        pieces = [piece for event in told for piece in event["choices"] if piece["index"] == choice["index"]]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
        assert pieces[-1]["finish_reason"]
        assert not any("\ufffd" in piece["text"] for piece in pieces)
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [value for piece in pieces for value in piece["logprobs"][name]] == values


def test_a_chat_stream(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(EMOJI)
    engine.faults.delay = 0.002
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "logprobs": True, "top_logprobs": 1}
    whole = client.post("/v1/chat/completions", json=body).json()
    told = events(client, "chat/completions", **body, stream_options={"include_usage": True})
    assert [event["choices"][0]["delta"] for event in told[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert {event["object"] for event in told} == {"chat.completion.chunk"}
    assert {event["id"] for event in told} == {told[0]["id"]}
    assert texts(told) == {0: EMOJI, 1: EMOJI}
    assert told[-1]["usage"] == whole["usage"]
    assert told[-1]["choices"] == []
    pieces = [piece for event in told for piece in event["choices"] if piece["index"] == 1 and piece["logprobs"]]
    assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == whole["choices"][1]["logprobs"]["content"]


@pytest.mark.parametrize("extra", [{}, {"n": 2, "logprobs": 1}, {"stop": ["fox"]}, {"echo": True}])
def test_every_chunk_may_carry_the_usage_of_its_choice(client: httpx.Client, engine: FakeEngine, extra: dict[str, Any]) -> None:
    engine.says = ids(EMOJI)
    engine.faults.delay = 0.002
    body = {"prompt": ["The 🦊", "red"], "max_tokens": 100, **extra}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *told, last = events(client, "completions", **body, stream_options=options)
    prompts = [len(ids(prompt)) for prompt in body["prompt"] for _ in range(extra.get("n", 1))]
    final: dict[int, int] = {}
    for event in told:
        (choice,), usage = event["choices"], event["usage"]
        index, completion = choice["index"], usage["completion_tokens"]
        assert usage == {
            "prompt_tokens": prompts[index],
            "completion_tokens": completion,
            "total_tokens": prompts[index] + completion,
        }
        assert completion >= final.get(index, 0)
        if "stop" not in extra and not (extra.get("echo") and index not in final):
            assert completion > final.get(index, 0) or choice["finish_reason"], "each token gives a chunk, so each chunk has more"
        final[index] = completion
    assert sum(final.values()) == last["usage"]["completion_tokens"]
    assert last["choices"] == []


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_chunks_have_no_usage_unless_both_options_ask(shared: httpx.Client, options: dict[str, bool] | None) -> None:
    """As in vLLM, ``continuous_usage_stats`` has an effect only with ``include_usage``."""
    told = events(shared, "completions", prompt="x", max_tokens=3, stream_options=options)
    assert all(event["usage"] is None for event in told if event["choices"])
    assert sum(event["usage"] is not None for event in told) == bool(options and options.get("include_usage"))


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_error_before_the_first_token_is_a_status(client: httpx.Client, engine: FakeEngine, path: str) -> None:
    body = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    engine.faults.fail = wire.Failed("", "overloaded", "full", retry_after=7)
    answer = client.post(f"/v1/{path}", json={**body, "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    engine.faults.fail = None
    engine.faults.fail_after = 0
    assert client.post(f"/v1/{path}", json={**body, "stream": True}).status_code == 500
    engine.faults.fail_after = None
    engine.faults.break_after = 0
    assert client.post(f"/v1/{path}", json={**body, "stream": True}).status_code == 502


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("fail_after", "internal_error", "as it was told"),
        ("break_after", "engine_lost", "connection to the engine broke"),
        ("skip_after", "engine_lost", "skipped or repeated"),
    ],
)
def test_an_error_midway_is_the_last_event(client: httpx.Client, engine: FakeEngine, fault: str, code: str, words: str) -> None:
    engine.says = ids("red shoes, blue table")
    engine.faults.delay = 0.01
    setattr(engine.faults, fault, 2)
    *told, last = events(client, "completions", prompt="x")
    assert texts(told)
    assert last["error"]["code"] == code
    assert words in last["error"]["message"]
    setattr(engine.faults, fault, 0)
    whole = client.post("/v1/completions", json={"prompt": "x"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500 if code == "internal_error" else 502, code)


def test_a_prompt_that_fails_ends_its_neighbours(client: httpx.Client, engine: FakeEngine) -> None:
    engine.faults.delay = 0.05
    engine.faults.fail_after = 3
    answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 100, "ignore_eos": True})
    assert answer.status_code == 500
    wait_until(lambda: len(engine.generates) == 3)


@pytest.mark.parametrize(("stream", "prompts"), [(True, 1), (False, 3)])
def test_a_client_that_leaves_stops_the_engine(client: httpx.Client, engine: FakeEngine, stream: bool, prompts: int) -> None:
    engine.faults.delay = 0.05
    body = {"prompt": ["x"] * prompts, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    with asking(client, "/v1/completions", body) as connection:
        wait_until(lambda: len(engine.generates) == prompts)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(engine.left) == prompts)
    wait_until(lambda: "yardstick_requests_in_flight 0.0" in client.get("/metrics").text)


def test_a_request_that_is_broken_off_is_no_fault(start: Start) -> None:
    client = start(FakeEngine())
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"prompt":')
    wait_until(lambda: metric(client, 'yardstick_requests_total{model="",route="/v1/completions",status="400"}') == 1)
    assert metric(client, "yardstick_requests_in_flight") == 0
