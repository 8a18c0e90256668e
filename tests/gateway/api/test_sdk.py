"""The OpenAI SDK drives the whole API over a real socket."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, logprobs_after, value_logit
from tests.gateway.conftest import Start, metrics
from tests.gateway.keys import entry, write

TOUR = Path(__file__).with_name("sdk_tour.py")
SDK_2 = Path(sys.prefix) / "openai-2"
"""Where `make setup` puts version 2 of the OpenAI SDK."""
VERSIONS = [pytest.param(2, marks=pytest.mark.slow), 3]
ASK = """
import json, sys, openai
for key, method, path, body in json.loads(sys.argv[2]):
    try:
        getattr(openai.OpenAI(base_url=sys.argv[1], api_key=key), method)(path, cast_to=object, body=body)
        print(200)
    except openai.APIStatusError as error:
        print(error.status_code)
"""
"""Sends requests and prints the status of each answer."""


def run(version: int, *arguments: str) -> str:
    """Return what a Python program prints that imports a version of the SDK."""
    environment = {**os.environ, **({"PYTHONPATH": str(SDK_2)} if version == 2 else {})}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_every_endpoint_through_the_sdk(client: httpx.Client, engine: FakeEngine, version: int) -> None:
    told = json.loads(run(version, str(TOUR), f"{client.base_url}/v1", engine.model))
    assert told["version"].startswith(f"{version}.")
    assert told["models"] == [engine.model]
    assert told["model"] == engine.model
    assert told["completions"]["fingerprint"] == f"fp_{engine.fingerprint}"
    assert told["chat"]["fingerprints"] == [f"fp_{engine.fingerprint}"]
    assert told["chat"]["service_tier"] is None
    check_completions(told["completions"], engine)
    check_chat(told["chat"])
    assert told["async"]["text"] == told["async"]["streamed"] == told["completions"]["texts"][0]
    assert told["async"]["helped"] == told["chat"]["text"]
    check_responses(told["responses"])
    check_errors(told["errors"])
    check_score(told["score"], engine)
    check_length(told["length"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sdk_repeats_no_request_that_is_always_refused(start: Start, tmp_path: Path, version: int) -> None:
    """It would repeat 409 and 429 twice each."""
    keys = write(
        tmp_path / "keys", entry("a", catalogues="write", items_per_minute=4), entry("light", weight=0.1, catalogues="write")
    )
    sizes = {"max_body_bytes": 10_000, "max_bytes_in_flight": 10_000}
    client = start(FakeEngine(), api_keys_file=keys, **sizes)
    five = {"query": [1], "items": [[2]] * 5, "label_token_ids": [1]}
    requests = [
        ("a", "put", "/catalogues/shop", {}),
        ("a", "put", "/catalogues/shop", {"template": "{item} {query}"}),
        ("a", "post", "/score", five),
        ("light", "post", "/completions", {"prompt": "a" * 5000}),
        ("light", "post", "/completions", {"prompt": "a" * 20_000}),
    ]
    assert run(version, "-c", ASK, f"{client.base_url}/v1", json.dumps(requests)).split() == ["200", "409", "429", "413", "413"]
    counted = metrics(
        client,
        'yardstick_requests_total{model="fake",route="/v1/catalogues/{name}",status="409"}',
        'yardstick_requests_total{model="fake",route="/v1/score",status="429"}',
        'yardstick_requests_total{model="",route="/v1/completions",status="413"}',
    )
    assert counted == [1, 1, 2]


def check_completions(completions: dict[str, Any], engine: FakeEngine) -> None:
    assert completions["texts"] == completions["streamed"]
    assert len(set(completions["texts"])) == 2
    prompt = ids("The quick brown fox")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 24, "total_tokens": len(prompt) + 24}
    assert completions["usage"] | usage == completions["usage"] == completions["streamed_usage"]
    assert [len(row) for row in completions["logprobs"]] == [12, 12]
    expected = [None] + [logprobs_after(prompt[:place], engine.vocab_size)[prompt[place]] for place in range(1, len(prompt))]
    assert completions["prompt_logprobs"][0] == expected
    assert completions["prompt_texts"] == ["The quick brown fox", "Yes"]
    assert ["".join(tokens) for tokens in completions["prompt_tokens"]] == completions["prompt_texts"]


def check_chat(chat: dict[str, Any]) -> None:
    assert chat["text"] == chat["streamed"]
    assert chat["first_role"] == "assistant"
    assert chat["finish"] == chat["streamed_finish"] == "length"
    assert chat["logprobs"] == chat["streamed_logprobs"]
    assert b"".join(map(bytes, chat["bytes"])).decode(errors="replace") == chat["text"]
    assert chat["top"] == [3] * 12
    assert chat["usage"]["completion_tokens"] == 12


def check_responses(told: dict[str, Any]) -> None:
    assert told["text"] == told["streamed"] == told["last"] == told["snapshot"] == told["final"] == told["kept"]
    assert (told["status"], told["reason"], told["output_tokens"]) == ("incomplete", "max_output_tokens", 12)
    assert told["top"] == [3] * 12
    assert len(told["logprobs"]) == 12
    assert told["numbers"]
    assert told["items"] == ["The quick brown fox"]
    assert told["more_tokens"] > 0
    assert told["gone"] == "response_not_found"


def check_errors(errors: dict[str, Any]) -> None:
    assert errors == {
        "unknown_model": {"class": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"},
        "tools": {"class": "BadRequestError", "status": 400, "code": None, "param": "tools"},
        "temperature": {"class": "BadRequestError", "status": 400, "code": None, "param": "temperature"},
    }


def check_length(length: dict[str, Any]) -> None:
    assert [len(row) for row in length["values"]] == [3] * 8
    assert len(length["written_values"]) == 8
    assert set(length["written_values"]) <= {1, 2, 3}  # tokens that are parts of characters share a text
    assert length["values"] == length["streamed_values"]
    first = [row[0] for row in length["values"]]
    assert length["remaining_tokens"] == [pytest.approx(math.log(1 - value) / math.log(0.985)) for value in first]
    assert 0 < length["aimed_tokens"] <= 56
    prompts = [ids("The quick brown fox" + partial) for partial in ("", " jumps")]
    assert length["texts"] == [pytest.approx(1 / (1 + math.exp(-value_logit(prompt)))) for prompt in prompts]


def check_score(score: dict[str, Any], engine: FakeEngine) -> None:
    labels = [ids(" Yes")[0], ids(" No")[0]]
    rows = [logprobs_after(ids(f"Is it relevant? {item}"), engine.vocab_size) for item in ("red shoes", "blue table")]
    expected = [[math.exp(row[label]) for label in labels] for row in rows]
    assert score == {"object": "scoring", "scores": [pytest.approx(row) for row in expected]}
