"""Errors that clients receive: the status, OpenAI's format, and the field that is wrong."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.answers import check_refused, told
from tests.gateway.conftest import Start
from yardstick_llm.engine import wire

SCORE = {"query": "a", "items": ["b"], "label_token_ids": [1]}
IDS = {"query": [1], "items": [[2]], "label_token_ids": [1]}
COMPLETION = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("score", {**SCORE, "model": "other"}, 404, "model", "'other' does not exist"),
        ("score", {**SCORE, "label_token_ids": [1, 10**6]}, 400, "label_token_ids[1]", "1000000 is not a token"),
        ("score", {**SCORE, "label_token_ids": []}, 400, "label_token_ids", "empty"),
        ("score", {**SCORE, "label_token_ids": [1] * 17}, 400, "label_token_ids", "at most 16"),
        ("score", {"query": "a", "items": ["b"], "labels": [""]}, 400, "labels[0]", "0 tokens"),
        ("score", {"query": "a", "items": ["b"]}, 400, "labels", "either"),
        ("score", {**SCORE, "labels": [" Yes"]}, 400, "labels", "either"),
        ("score", {**SCORE, "items": ["b", 3]}, 400, "items[1]", "got `int`"),
        ("score", {**IDS, "items": [[2], [3, "x"]]}, 400, "items[1][1]", "got `str`"),
        ("score", {**SCORE, "items": ["b", [1]]}, 400, "items[1]", "another kind"),
        ("score", {**IDS, "items": "b"}, 400, "items[0]", "another kind"),
        ("score", {**IDS, "items": [[2], [-1]]}, 400, "items[1][0]", "`int` >= 0"),
        ("score", {**IDS, "query": [10**6]}, 400, "query[0]", "is not a token"),
        ("score", {**SCORE, "query": "", "items": ["b", ""]}, 400, "items[1]", "both empty"),
        ("score", {**SCORE, "items": ["b"] * 10_001}, 400, "items", "length"),
        ("score", {**SCORE, "priority": 2**40}, 400, "priority", "<="),
        ("score", {"items": ["b"]}, 400, "query", "missing"),
        ("completions", {**COMPLETION, "temperature": -0.1}, 400, "temperature", ">= 0"),
        ("completions", {**COMPLETION, "logprobs": 21}, 400, "logprobs", "<= 20"),
        ("completions", {**COMPLETION, "n": 9}, 400, "n", "at most 8"),
        ("completions", {**COMPLETION, "suffix": "x"}, 400, "suffix", "not supported"),
        ("completions", {**COMPLETION, "stop": [""]}, 400, "stop[0]", "length >= 1"),
        ("completions", {**COMPLETION, "stop": ["x"] * 17}, 400, "stop", "length <= 16"),
        ("completions", {**COMPLETION, "stop": ["x", "y" * 4097]}, 400, "stop[1]", "at most 4096"),
        ("completions", {**COMPLETION, "logit_bias": {str(id): 1 for id in range(4097)}}, 400, "logit_bias", "at most 4096"),
        ("completions", {"prompt": ["a"] * 200, "n": 8}, 400, "prompt", "max_sequences"),
        ("score", {**IDS, "items": [[2]] * 5000, "label_token_ids": [1] * 16, "query": [1] * 2048}, 400, "items[0]", "context"),
        ("completions", {**COMPLETION, "max_tokens": 0}, 400, "max_tokens", "echo"),
        ("completions", {**COMPLETION, "min_tokens": 17}, 400, "min_tokens", "16 tokens"),
        ("completions", {**COMPLETION, "logit_bias": {"5": 101}}, 400, "logit_bias[...]", "<= 100"),
        ("completions", {**COMPLETION, "logit_bias": {"x": 1}}, 400, "logit_bias", "key"),
        ("completions", {**COMPLETION, "logit_bias": {"99999": 1}}, 400, "logit_bias", "not a token"),
        ("completions", {**COMPLETION, "stop_token_ids": [-1]}, 400, "stop_token_ids", "not a token"),
        ("completions", {**COMPLETION, "stream_options": {}}, 400, "stream_options", "only for streams"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": []}, 400, "prompt", "length >= 1"),
        ("completions", {"prompt": [[]]}, 400, "prompt[0]", "empty"),
        ("completions", {"prompt": ["a", 1]}, 400, "prompt", "mixes kinds"),
        ("completions", {"prompt": ["a"] * 1025}, 400, "prompt", "at most 1024"),
        ("completions", {"prompt": [10**6]}, 400, "prompt[0]", "not a token"),
        ("completions", {"prompt": [[1], [1] * 2049]}, 400, "prompt[1]", "context"),
        ("chat/completions", {"messages": []}, 400, "messages", "length >= 1"),
        (
            "chat/completions",
            {"messages": [{"role": "boss", "content": "a"}]},
            400,
            "messages[0].role",
            "boss'; it is one of 'assistant'",
        ),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs `logprobs`"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_completion_tokens", "at least one"),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "must not set"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "messages", "context"),
    ],
)
def test_wrong_requests(shared: httpx.Client, path: str, body: dict[str, Any], status: int, param: str, words: str) -> None:
    answer = shared.post(f"/v1/{path}", json=body)
    check_refused(answer, param, words, status)
    assert told(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"\xff\xfe{", "UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "no NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "no NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "a"} {}', "not valid JSON"),
    ],
)
def test_bodies_that_are_no_requests(shared: httpx.Client, content: bytes, words: str) -> None:
    answer = shared.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in told(answer)["message"]


@pytest.mark.parametrize("content_type", [None, "application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_content_types_of_json(shared: httpx.Client, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = shared.post("/v1/completions", content=json.dumps({"prompt": "a", "max_tokens": 1}), headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_content_types_that_are_not_json(shared: httpx.Client, content_type: str) -> None:
    answer = shared.post("/v1/completions", content=json.dumps({"prompt": "a"}), headers={"content-type": content_type})
    assert (answer.status_code, told(answer)["code"]) == (415, "unsupported_media_type")
    assert "curl" in told(answer)["message"]


def test_paths_and_methods_that_do_not_exist(shared: httpx.Client) -> None:
    missing = shared.get("/v1/images/generations")
    assert (missing.status_code, told(missing)["code"]) == (404, "not_found")
    wrong = shared.get("/v1/score")
    assert (wrong.status_code, told(wrong)["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    model = shared.get("/v1/models/other")
    assert (model.status_code, told(model)["code"]) == (404, "model_not_found")


def test_request_ids_are_kept_where_sane(shared: httpx.Client) -> None:
    for path in ("/livez", "/nowhere", "/v1/models"):
        assert shared.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert "mine" not in shared.get(path, headers={"x-request-id": "mine" * 100}).headers["x-request-id"]


def test_a_body_that_is_too_large(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, max_body_bytes=1000)
    answer = client.post("/v1/score", json={**SCORE, "query": "x" * 1000})
    assert (answer.status_code, told(answer)["code"]) == (413, "request_too_large")

    def chunks() -> Any:
        for _ in range(10):
            yield b"x" * 200

    assert client.post("/v1/score", content=chunks()).status_code == 413


@pytest.mark.parametrize(
    ("code", "status", "told_code"),
    [
        ("invalid", 400, None),
        ("overloaded", 429, "overloaded"),
        ("not_ready", 503, "not_ready"),
        ("out_of_memory", 503, "out_of_memory"),
        ("deadline", 504, "deadline_exceeded"),
        ("aborted", 502, "engine_lost"),
        ("internal", 500, "internal_error"),
    ],
)
def test_what_an_engine_refuses(client: httpx.Client, engine: FakeEngine, code: Any, status: int, told_code: str | None) -> None:
    engine.faults.fail = wire.Failed("", code, "no, for a reason", retry_after=2.5)
    bodies = {"score": IDS, "completions": COMPLETION, "chat/completions": {**CHAT, "stream": True}}
    path = {"invalid": "score", "overloaded": "completions"}.get(code, "chat/completions")
    answer = client.post(f"/v1/{path}", json=bodies[path])
    assert answer.status_code == status
    assert told(answer) | {"message": "no, for a reason", "code": told_code} == told(answer)
    assert answer.headers.get("retry-after") == ("3" if status in (429, 503) and code != "out_of_memory" else None)


def test_an_engine_that_is_gone_or_speaks_nonsense_comes_back(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, engine_seconds=0.3)
    engine.faults.delay = 5
    answer = client.post("/v1/score", json=IDS)
    assert (answer.status_code, told(answer)["code"]) == (504, "deadline_exceeded")
    engine.faults.delay = 0
    engine.faults.break_after = 0
    answer = client.post("/v1/score", json=IDS)
    assert (answer.status_code, told(answer)["code"]) == (502, "engine_lost")
    engine.faults.break_after, engine.faults.garbage = None, True
    for path, body in (("score", IDS), ("completions", COMPLETION)):
        answer = client.post(f"/v1/{path}", json=body)
        assert (answer.status_code, told(answer)["code"]) == (502, "engine_lost")
    engine.faults.garbage = False
    assert client.post("/v1/score", json=IDS).status_code == 200


def test_what_a_model_cannot_do(start: Start) -> None:
    scorer, writer = FakeEngine(model="scorer", capabilities=("score",)), FakeEngine(model="writer", capabilities=("generate",))
    client = start(scorer, writer, FakeEngine(model="embedder", capabilities=("embed",), embedding_size=4))
    for path, body, model, words in (
        ("/v1/completions", COMPLETION, "scorer", "does not generate text; it serves /v1/rerank, /v1/score."),
        ("/v1/score", SCORE, "writer", "does not score; it serves /v1/chat/completions."),
        ("/v1/score", SCORE, "embedder", "does not score; it serves /v1/embeddings."),
    ):
        assert told(client.post(path, json={**body, "model": model}))["message"].endswith(words)


def test_a_body_that_nobody_reads_ends_the_connection(shared: httpx.Client) -> None:
    """Otherwise the rest of it would have to be read after the answer."""
    with socket.create_connection((shared.base_url.host, shared.base_url.port)) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\nx")
        received = b""
        while part := connection.recv(1000):
            received += part
    assert (received.split()[1], b"connection: close" in received) == (b"404", True)


def test_bodies_of_get_requests_do_no_harm(shared: httpx.Client) -> None:
    for _ in range(3):
        assert shared.request("GET", "/v1/models", content=b"x" * 100).status_code == 200
