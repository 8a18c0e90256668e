"""Prompt lookup over HTTP, with a gateway and an engine process: the tokens of plain decoding in fewer steps, and what usage and
metrics tell of the drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.attacks.watch import total_of
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, gateway_before

pytestmark = pytest.mark.slow

PROMPT = "the red shoes, the blue shoes, the red shoes, the"
BIAS = {"262": 6.0, "266": 6.0, "15": 4.0}
"""Makes a model with random weights repeat some tokens, so that drafts are right now and then."""
COUNTERS = ("yardstick_engine_accepted_draft_tokens_total", "yardstick_engine_draft_tokens_total")
SEVERAL: dict[str, Any] = {"temperature": 0.6, "seed": 5, "n": 3, "frequency_penalty": 0.1}


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    model = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)
    with Pod(model, "--name", "tiny", "--threads", "1") as pod:
        yield pod


@pytest.fixture(scope="module")
def client(pod: Pod) -> Iterator[httpx.Client]:
    with gateway_before(pod) as gateway:
        yield gateway.client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "logprobs": 0, "logit_bias": BIAS} | fields


def choices(answer: Any) -> list[tuple[str, list[str]]]:
    return [(choice["text"], choice["logprobs"]["tokens"]) for choice in by_index(answer)]


def logprobs(answer: Any) -> list[float]:
    return [value for choice in by_index(answer) for value in choice["logprobs"]["token_logprobs"]]


def by_index(answer: Any) -> list[Any]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def test_drafts_change_no_token_and_are_counted(client: httpx.Client, pod: Pod) -> None:
    plain = client.post("/v1/completions", json=body(**SEVERAL)).raise_for_status().json()
    assert "accepted_prediction_tokens" not in (plain["usage"].get("completion_tokens_details") or {})
    before = [total_of(pod, name) for name in COUNTERS]
    asked = body(**SEVERAL, prompt_lookup={"max_tokens": 6, "ngram": 2})
    found = client.post("/v1/completions", json=asked).raise_for_status().json()
    assert choices(found) == choices(plain)
    assert logprobs(found) == pytest.approx(logprobs(plain), abs=1e-4)
    usage = found["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (
        plain["usage"]["completion_tokens"],
        plain["usage"]["prompt_tokens"],
    )
    accepted, rejected = (usage["completion_tokens_details"][f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
    assert accepted > 0
    counted = [total_of(pod, name) - earlier for name, earlier in zip(COUNTERS, before, strict=True)]
    assert counted == [accepted, accepted + rejected]


def test_a_streamed_chat_has_the_text_of_plain_decoding(client: httpx.Client) -> None:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": BIAS,
    }
    whole = client.post("/v1/chat/completions", json=asked | {"ignore_eos": True}).raise_for_status().json()
    streamed = asked | {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "prompt_lookup": {}}
    text, usage = "", None
    with client.stream("POST", "/v1/chat/completions", json=streamed) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        usage = event["usage"] or usage if "usage" in event else usage
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 60
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_wrong_field_is_refused_by_name(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=body(prompt_lookup={"max_tokens": 33}))
    assert answer.status_code == 400
    assert "prompt_lookup" in answer.json()["error"]["message"]
