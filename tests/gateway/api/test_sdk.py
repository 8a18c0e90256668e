"""The OpenAI SDK drives the whole API over a real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metrics
from tests.gateway.keys import entry, write

TOUR = Path(__file__).with_name("sdk_tour.py")
SDK_2 = Path(sys.prefix) / "openai-2"
"""Where `make setup` puts version 2 of the OpenAI SDK."""
ASK = """
import json, sys, openai
for key, method, path, body in json.loads(sys.argv[2]):
    try:
        getattr(openai.OpenAI(base_url=sys.argv[1], api_key=key), method)(path, cast_to=object, body=body)
        print(200)
    except openai.APIStatusError as error:
        print(error.status_code)
stream = openai.OpenAI(base_url=sys.argv[1], api_key="light").completions.create(model="fake", prompt="x", stream=True)
print("".join(choice.text for chunk in stream for choice in chunk.choices), end="")
"""
"""Sends requests and prints the status of each answer, and the text of a stream."""


def run(*arguments: str, **variables: str) -> str:
    """Return what a Python program prints."""
    environment = os.environ | variables
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_endpoint_through_version_2(client: httpx.Client, engine: FakeEngine) -> None:
    """The installed version does so on a real engine, in tests/test_end_to_end.py."""
    told = json.loads(run(str(TOUR), f"{client.base_url}/v1", engine.model, PYTHONPATH=str(SDK_2)))
    assert told["version"].startswith("2.")
    assert told["models"] == [engine.model]
    assert told["completions"]["texts"] == told["completions"]["streamed"]
    assert told["chat"]["text"] == told["chat"]["streamed"] == told["async"]["helped"]
    assert told["responses"]["text"] == told["responses"]["streamed"] == told["responses"]["kept"]
    assert told["length"]["values"] == told["length"]["streamed_values"]
    assert {error["status"] for error in told["errors"].values()} == {400, 404}


def test_the_sdk_repeats_no_request_that_is_always_refused(start: Start, tmp_path: Path) -> None:
    """It would repeat 409 and 429 twice each. And it ignores the comments in streams that wait."""
    keys = write(
        tmp_path / "keys", entry("a", catalogues="write", items_per_minute=4), entry("light", weight=0.1, catalogues="write")
    )
    sizes = {"max_body_bytes": 10_000, "max_bytes_in_flight": 10_000}
    engine = FakeEngine(says=ids("red"))
    engine.faults.delay = 0.4
    client = start(engine, api_keys_file=keys, keepalive_seconds=0.1, **sizes)
    five = {"query": [1], "items": [[2]] * 5, "label_token_ids": [1]}
    requests = [
        ("a", "put", "/catalogues/shop", {}),
        ("a", "put", "/catalogues/shop", {"template": "{item} {query}"}),
        ("a", "post", "/score", five),
        ("light", "post", "/completions", {"prompt": "a" * 5000}),
        ("light", "post", "/completions", {"prompt": "a" * 20_000}),
    ]
    told = run("-c", ASK, f"{client.base_url}/v1", json.dumps(requests)).split()
    assert told == ["200", "409", "429", "413", "413", "red"]
    counted = metrics(
        client,
        'yardstick_requests_total{model="fake",route="/v1/catalogues/{name}",status="409"}',
        'yardstick_requests_total{model="fake",route="/v1/score",status="429"}',
        'yardstick_requests_total{model="",route="/v1/completions",status="413"}',
    )
    assert counted == [1, 1, 2]
