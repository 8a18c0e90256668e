"""Parameters of other servers: refused with a reason, or ignored and named in a header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.answers import check_refused
from tests.gateway.conftest import gateways

LONG = 64 << 10
"""Characters of a body in which names of unknown fields are not searched for."""
MOST_NAMES = 32
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


BODIES = {endpoint: {"model": "fake"} | body for endpoint, body in BODIES.items()}


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """A client of a gateway before three models, which serve all endpoints together."""
    head = FakeEngine(model="head", fingerprint="head", capabilities=("classify",), classes=("a", "b"))
    embedder = FakeEngine(model="embedder", fingerprint="embedder", capabilities=("embed",), embedding_size=4)
    with gateways() as start_gateway:
        yield start_gateway(FakeEngine(), head, embedder)


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
    ("completions", {"guided_jsn": {"type": "object"}}, "guided_jsn", "`guided_json`"),
    ("responses", {"max_output_token": 5}, "max_output_token", "`max_output_tokens`"),
    ("score", {"apply_soft_max": True}, "apply_soft_max", "`apply_softmax`"),
    ("embeddings", {"dimension": 2}, "dimension", "`dimensions`"),
    ("score", {"priorty": 1}, "priorty", "`priority`"),
    ("chat", {"logprob": True}, "logprob", "`logprobs`"),
]


@pytest.mark.parametrize(("endpoint", "fields", "param", "name"), MISSPELT)
def test_a_misspelt_or_misplaced_field_is_refused(
    shared: httpx.Client, endpoint: str, fields: dict[str, Any], param: str, name: str
) -> None:
    answer = shared.post(f"/v1/{PATHS[endpoint]}", json=BODIES[endpoint] | fields)
    check_refused(answer, param, f"did you mean {name}?")


def test_a_long_body_has_no_misspelt_guidance(shared: httpx.Client) -> None:
    body = BODIES["chat"] | {"user": "x" * LONG, "length_guidence": {"target_length": 80}}
    check_refused(shared.post("/v1/chat/completions", json=body), "length_guidence")


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
    check_refused(refused, "messages[1].function_call", "not supported")
    messages = [*MESSAGES, message | {"function_call": None}]
    accepted = shared.post("/v1/chat/completions", json={"model": "fake", "messages": messages, "max_tokens": 1})
    assert accepted.status_code == 200, accepted.text


def test_the_header_is_bounded(shared: httpx.Client) -> None:
    names = {f"field_{number}_{'x' * 60}": 1 for number in range(100)}
    message = {"role": "user", "content": "a", **names}
    answer = shared.post("/v1/chat/completions", json={"model": "fake", "messages": [message] * 3, "max_tokens": 1, **names})
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-yardstick-ignored"].split(", ")
    assert len(listed) == MOST_NAMES
    assert len(answer.headers["x-yardstick-ignored"]) < 2200


def test_listed_fields_of_a_long_body_are_named_and_refused_ones_are_not_decoded(shared: httpx.Client) -> None:
    long = BODIES["completions"] | {"user": "x" * LONG, "store": True, "unlisted": 1}
    assert shared.post("/v1/completions", json=long).headers["x-yardstick-ignored"] == "store"
    deep = b'{"model": "fake", "prompt": "a", "audio": ' + b"[" * 500 + b"1" * 50_000 + b"]" * 500 + b"}"
    for content in (json.dumps(long | {"audio": "a+"}).encode(), deep):
        refused = shared.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert (refused.status_code, "`audio` is not supported" in refused.json()["error"]["message"]) == (400, True)
