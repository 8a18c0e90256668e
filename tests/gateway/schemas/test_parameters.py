"""Parameters of other servers: refused with a reason, or ignored and named in a header."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway.errors import InvalidRequest
from gateway.http.context import MAX_NAMES
from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.decoding import MAX_IGNORED, SEARCHED_BYTES, BodyDecoder
from gateway.schemas.length import LengthRequest
from gateway.schemas.score import ScoreRequest
from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways

PATHS = {
    "score": "score",
    "rerank": "rerank",
    "classify": "classify",
    "embeddings": "embeddings",
    "completions": "completions",
    "chat": "chat/completions",
    "responses": "responses",
    "length": "length",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "score": {"query": [1], "items": [[2]], "label_token_ids": [1]},
    "rerank": {"query": "a", "documents": ["b"]},
    "classify": {"input": "a", "model": "head"},
    "embeddings": {"input": "a", "model": "embedder"},
    "completions": {"prompt": [1, 2], "max_tokens": 1},
    "chat": {"messages": MESSAGES, "max_tokens": 1},
    "responses": {"input": "a", "max_output_tokens": 1},
    "length": {"input": [1, 2]},
    "tokenize": {"messages": MESSAGES},
    "detokenize": {"tokens": [1, 2]},
}
KINDS = {"score": ScoreRequest, "completions": CompletionRequest, "chat": ChatRequest, "length": LengthRequest}


BODIES = {endpoint: {"model": "fake"} | body for endpoint, body in BODIES.items()}


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """A client of a gateway before three models, which serve all endpoints together."""
    head = FakeEngine(model="head", fingerprint="head", capabilities=("classify",), classes=("a", "b"))
    embedder = FakeEngine(model="embedder", fingerprint="embedder", capabilities=("embed",), embedding_size=4)
    with gateways() as start_gateway:
        yield start_gateway(FakeEngine(), head, embedder)


def test_names_that_other_servers_use_for_supported_fields_are_supported(shared: httpx.Client) -> None:
    fields = {"n": 1, "logprobs": None, "stream_options": None, "user": "me", "top_k": -1, "min_p": 0.0, "ignore_eos": True}
    answer = shared.post("/v1/chat/completions", json=BODIES["chat"] | fields)
    assert answer.status_code == 200, answer.text
    assert "x-yardstick-ignored" not in answer.headers


MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"length_guidence": {"target_length": 80}}, "length_guidence", "`length_guidance`"),
    ("chat", {"lengthGuidance": {"scale": -10}}, "lengthGuidance", "`length_guidance`"),
    ("chat", {"length_guidence": {"scales": 1}}, "length_guidence", "`length_guidance`"),
    ("responses", {"target_length": 80}, "target_length", "`length_guidance.target_length`"),
    ("completions", {"target_lenght": 80}, "target_lenght", "`length_guidance.target_length`"),
    ("chat", {"scale": -10}, "scale", "`length_guidance.scale`"),
    ("chat", {"applies_to": "thinking"}, "applies_to", "`length_guidance.applies_to`"),
    ("completions", {"length_guidance": {"target_lenght": 80}}, "length_guidance.target_lenght", "`length_guidance.target_length`"),
    ("chat", {"custom_params": {"value_scales": 2}}, "custom_params.value_scales", "`custom_params.value_scale`"),
    ("chat", {"prompt_lookups": {"ngram": 2}}, "prompt_lookups", "`prompt_lookup`"),
    ("chat", {"temprature": 0}, "temprature", "`temperature`"),
    ("responses", {"max_output_token": 5}, "max_output_token", "`max_output_tokens`"),
    ("score", {"apply_soft_max": True}, "apply_soft_max", "`apply_softmax`"),
    ("embeddings", {"dimension": 2}, "dimension", "`dimensions`"),
]


@pytest.mark.parametrize(("endpoint", "fields", "param", "name"), MISSPELT)
def test_a_misspelt_or_misplaced_field_is_refused(
    shared: httpx.Client, endpoint: str, fields: dict[str, Any], param: str, name: str
) -> None:
    answer = shared.post(f"/v1/{PATHS[endpoint]}", json=BODIES[endpoint] | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], f"did you mean {name}?" in error["message"]) == (param, True), error


def test_a_long_body_has_no_misspelt_guidance(shared: httpx.Client) -> None:
    body = BODIES["chat"] | {"user": "x" * SEARCHED_BYTES, "length_guidence": {"target_length": 80}}
    answer = shared.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "length_guidence")


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "instruct"},  # text-generation-webui
        {"models": ["a", "b"], "provider": {}},  # OpenRouter
        {"return_tokens": True},  # llama.cpp
        {"length_guidence": None},
        {"x" * 60_000: 1},
    ],
)
def test_fields_of_others_are_ignored(shared: httpx.Client, fields: dict[str, Any]) -> None:
    answer = shared.post("/v1/chat/completions", json=BODIES["chat"] | fields)
    assert answer.status_code == 200, answer.text
    assert "x-yardstick-ignored" in answer.headers


def test_nested_fields_are_named_once_with_their_path(shared: httpx.Client) -> None:
    message = {
        "role": "user",
        "refusal": None,
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}],
    }
    body = {
        "model": "fake",
        "messages": [*MESSAGES, message, message],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": True},
        "custom_params": {"thinking_budget": 3},
        "store": False,
        "chat_template_kwargs": {"anything": 1},
        "beam": {"width": {"deep": 1}},
        "ключ": 1,
        "x\r\ny": 1,
    }
    answer = shared.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-yardstick-ignored"].split(", ") == [
        "store",
        "beam",
        "?",
        "?",
        "messages[].refusal",
        "messages[].content[].cache",
        "stream_options.include_obfuscation",
        "custom_params.thinking_budget",
    ]


def test_an_earlier_function_call_is_refused(shared: httpx.Client) -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    refused = shared.post("/v1/chat/completions", json={"model": "fake", "messages": [*MESSAGES, message]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].function_call"
    assert "not supported" in refused.json()["error"]["message"]
    messages = [*MESSAGES, message | {"function_call": None}]
    accepted = shared.post("/v1/chat/completions", json={"model": "fake", "messages": messages, "max_tokens": 1})
    assert accepted.status_code == 200, accepted.text


def test_the_header_is_bounded(shared: httpx.Client) -> None:
    names = {f"field_{number}_{'x' * 60}": 1 for number in range(100)}
    message = {"role": "user", "content": "a", **names}
    answer = shared.post("/v1/chat/completions", json={"model": "fake", "messages": [message] * 3, "max_tokens": 1, **names})
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-yardstick-ignored"].split(", ")
    assert len(listed) == MAX_IGNORED == MAX_NAMES
    assert len(answer.headers["x-yardstick-ignored"]) < 2200


def test_a_long_body_is_decoded_once_and_its_listed_fields_are_named() -> None:
    decoder = BodyDecoder(CompletionRequest)
    long = {"prompt": "x" * SEARCHED_BYTES, "store": True, "unlisted": 1}
    request, ignored = decoder.decode(json.dumps(long).encode())
    assert (request.prompt, ignored) == (long["prompt"], ["store"])
    with pytest.raises(InvalidRequest, match="`audio` is not supported"):
        decoder.decode(json.dumps(long | {"audio": "a+"}).encode())


def test_a_refused_value_is_not_decoded() -> None:
    deep = b'{"prompt": "a", "audio": ' + b"[" * 500 + b"1" * 50_000 + b"]" * 500 + b"}"
    with pytest.raises(InvalidRequest, match="`audio` is not supported"):
        BodyDecoder(CompletionRequest).decode(deep)


@pytest.mark.parametrize("endpoint", KINDS)
def test_requests_cross_process_boundaries(endpoint: str) -> None:
    for extra in ({}, {"store": 1, "unknown": 2}):
        request, _ = BodyDecoder(KINDS[endpoint]).decode(json.dumps(BODIES[endpoint] | extra).encode())
        packed = msgspec.msgpack.encode(msgspec.structs.replace(request, cache_salt="x"))
        for copied in (pickle.loads(pickle.dumps(request)), msgspec.msgpack.decode(packed, type=KINDS[endpoint])):
            assert type(copied) is KINDS[endpoint]
            names = set(KINDS[endpoint].__struct_fields__) - {"messages", "cache_salt"}
            assert all(getattr(copied, name) == getattr(request, name) for name in names)
            if endpoint == "chat":
                assert copied.messages == [ChatMessage("user", "a")]


def test_unknown_fields_cost_less_than_twice_the_decoding_of_a_long_body() -> None:
    """A body of 9 MiB: what it takes with fields to ignore, against the plain decoding of the same body."""
    ids = {"query": [1], "items": [list(range(100)) for _ in range(9_999)], "label_token_ids": [1]}
    plain, extended = json.dumps(ids).encode(), json.dumps(ids | {"unknown": 1, "store": 2}).encode()
    decoder = BodyDecoder(ScoreRequest)

    def seconds(body: bytes) -> float:
        began = time.process_time()
        decoder.decode(body)
        return time.process_time() - began

    assert min(seconds(extended) for _ in range(5)) < 1.7 * min(seconds(plain) for _ in range(5))


@pytest.mark.alone
def test_no_search_takes_long() -> None:
    """The body within the bound that takes longest: as many messages as fit, each with an unknown field."""
    messages = [{"role": "user", "x": 1}] * (SEARCHED_BYTES // 26)
    body = json.dumps({"messages": messages, "y": 1}, separators=(",", ":")).encode()
    assert SEARCHED_BYTES * 0.8 < len(body) <= SEARCHED_BYTES
    decoder = BodyDecoder(ChatRequest)
    assert decoder.decode(body)[1] == ["y", "messages[].x"]

    def seconds() -> float:
        began = time.process_time()
        decoder.decode(body)
        return time.process_time() - began

    assert min(seconds() for _ in range(20)) < 0.015
