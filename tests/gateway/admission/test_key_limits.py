"""Restrictions of a key: models, limits, expiry; and changes of the key file."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.quotas import duration
from gateway.http.auth import KeyRing
from gateway.keys import ApiKey
from gateway.limits.base import Cost, Lease, Limits
from gateway.limits.local import LocalLimiter
from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric

SCORE = {"query": [1], "items": [[2], [3]], "label_token_ids": [1]}
COMPLETION = {"prompt": [1, 2, 3, 4], "max_tokens": 16}


def entry(name: str, **limits: Any) -> dict[str, Any]:
    """A key whose secret is its name."""
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    return replace(path, json.dumps({"keys": list(entries)}))


def replace(path: Path, text: str) -> Path:
    """In one step: the gateway may look at any time."""
    path.with_suffix(".draft").write_text(text)
    return path.with_suffix(".draft").replace(path)


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def ask(client: httpx.Client, name: str, path: str = "score", **body: Any) -> httpx.Response:
    return client.post(f"/v1/{path}", json={**(SCORE if path == "score" else COMPLETION), **body}, headers=by(name))


def test_requests_run_out_and_the_answer_says_when_they_are_back(start: Start, tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry("a", requests_per_minute=3, tokens_per_minute=1000), entry("b"))
    client = start(FakeEngine(), api_keys_file=file, metrics_names=True)
    answers = [ask(client, "a") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert [answer.headers["x-ratelimit-remaining-tokens"] for answer in answers[:2]] == ["996", "992"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[0].headers["x-ratelimit-reset-requests"] in ("20s", "19.999s")
    assert "x-ratelimit-limit-items" not in answers[0].headers
    refused = answers[3]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "3 requests a minute" in refused.json()["error"]["message"]
    assert 18 <= int(refused.headers["retry-after"]) <= 20
    assert 18_000 <= int(refused.headers["retry-after-ms"]) <= 20_000
    assert metric(client, 'yardstick_limited_total{key="a",limit="requests"}') == 1
    assert ask(client, "b").status_code == 200, "each key has its own"
    assert not any(name.startswith("x-ratelimit") for name in ask(client, "b").headers)


def test_items_are_counted_and_a_request_may_be_too_large_for_ever(start: Start, tmp_path: Path) -> None:
    client = start(FakeEngine(), api_keys_file=write(tmp_path / "keys", entry("a", items_per_minute=4)))
    assert ask(client, "a").headers["x-ratelimit-remaining-items"] == "2"
    refused = ask(client, "a", items=[[item] for item in range(5)])
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert "this request needs 5" in refused.json()["error"]["message"]
    assert ask(client, "a").status_code == 200, "what was refused cost nothing"
    assert ask(client, "a").status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_charged_as_expected_and_settled_as_used(start: Start, tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(says=ids("red"))
    client = start(engine, api_keys_file=write(tmp_path / "keys", entry("a", tokens_per_minute=1000)))
    answer = ask(client, "a", "completions", max_tokens=500, stream=stream)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 504)
    used = 4 + len(ids("red")) + 1
    again = ask(client, "a", "completions", max_tokens=500, stream=stream)
    assert int(again.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(1000 - 504 - used, abs=3)
    assert ask(client, "a", "completions", max_tokens=999).status_code == 429
    chat = {"messages": [{"role": "user", "content": "a"}]}
    limits = client.post("/v1/chat/completions", json=chat, headers=by("a"))
    assert limits.status_code == 429, "an answer without a limit is expected to have 1024 tokens"


def test_a_request_that_fails_here_costs_no_tokens(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=write(tmp_path / "keys", entry("a", tokens_per_minute=1000)))
    engine.faults.garbage = True
    assert ask(client, "a").status_code == 502
    engine.faults.garbage = False
    assert ask(client, "a").headers["x-ratelimit-remaining-tokens"] == "996"


def test_concurrency_is_of_requests_under_way(start: Start, tmp_path: Path) -> None:
    engine = FakeEngine()
    client = start(engine, api_keys_file=write(tmp_path / "keys", entry("a", concurrency=2)))
    engine.faults.delay = 0.5
    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(lambda item: ask(client, "a", items=[[item]]).status_code, range(4)))
    assert statuses == [200, 200, 429, 429]
    engine.faults.delay = 0
    assert ask(client, "a", items=[[9]]).status_code == 200
    with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}, headers=by("a")) as answer:
        assert answer.status_code == 200
    assert ask(client, "a", items=[[10]]).status_code == 200


@pytest.mark.slow
def test_the_sdk_waits_as_it_is_told(start: Start, tmp_path: Path) -> None:
    client = start(FakeEngine(), api_keys_file=write(tmp_path / "keys", entry("a", requests_per_minute=30)))
    answers: list[tuple[float, httpx.Response]] = []
    hooks = {"response": [lambda answer: answers.append((time.monotonic(), answer))]}
    with httpx.Client(event_hooks=hooks, timeout=20) as http:
        sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="a", max_retries=3, http_client=http)
        while ask(client, "a").status_code == 200:
            pass
        sdk.completions.create(model="fake", prompt=[1], max_tokens=1)
        (refused_at, refused), (answered_at, answered) = answers
        assert (refused.status_code, answered.status_code) == (429, 200)
        assert answered_at - refused_at > int(refused.headers["retry-after-ms"]) / 1000
        impatient = sdk.with_options(max_retries=0)

        def hurry() -> None:
            for _ in range(5):
                impatient.completions.create(model="fake", prompt=[1], max_tokens=1)

        with pytest.raises(openai.RateLimitError, match="30 requests a minute"):
            hurry()


def test_models_that_a_key_may_not_use_do_not_exist_for_it(start: Start, tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry("a", models=["one"]), entry("b"), entry("c", models=["three", "one"]))
    client = start(FakeEngine(model="one"), FakeEngine(model="two"), api_keys_file=file)

    def listed(name: str) -> list[str]:
        return [model["id"] for model in client.get("/v1/models", headers=by(name)).json()["data"]]

    assert (listed("a"), listed("b"), listed("c")) == (["one"], ["one", "two"], ["one"])
    assert ask(client, "a").json()["model"] == "one", "the only one for this key"
    assert ask(client, "a", model="one").status_code == 200
    assert ask(client, "b", model="two").status_code == 200
    assert ask(client, "c").status_code == 400, "this key has to choose"
    for name, model in (("a", "two"), ("a", "none"), ("c", "three")):
        for path in ("score", "completions"):
            refused = ask(client, name, path, model=model)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
            assert "two" not in refused.text.replace(f"model '{model}'", "")
    assert client.get("/v1/models/two", headers=by("a")).status_code == 404
    assert client.get("/v1/models/two", headers=by("b")).status_code == 200


def test_an_expired_key_is_told_so(start: Start, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    past, future = ((now + timedelta(days=days)).isoformat() for days in (-1, 1))
    client = start(FakeEngine(), api_keys_file=write(tmp_path / "keys", entry("a", expires=past), entry("b", expires=future)))
    refused = ask(client, "a")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "api_key_expired"
    assert "expired on" in refused.json()["error"]["message"]
    assert ask(client, "b").status_code == 200


@pytest.mark.slow
def test_the_command_writes_what_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    command = [sys.executable, "-m", "gateway.cli", "keys", "new", "ci", "--file", str(file), "--model", "m", "--model", "n"]
    command += ["--requests-per-minute", "5", "--tokens-per-minute", "6", "--items-per-minute", "7", "--concurrency", "8"]
    more = ["--group", "search", "--weight", "2.5", "--priority-min", "-7", "--priority-max", "3"]
    done = subprocess.run([*command, "--expires", "2031-02-03", *more], capture_output=True, text=True, check=True)
    found = KeyRing(file).find(done.stdout.strip())
    assert found is not None
    expires = datetime(2031, 2, 3, tzinfo=UTC)
    assert found == ApiKey("ci", found.sha256, ["m", "n"], 5, 6, 7, 8, expires, "search", 2.5, -7, 3)
    assert found.limits == Limits((5, 6, 7), 8)
    other = [*command[:5], "x", *command[6:8]]
    assert subprocess.run([*other, "--concurrency", "0"], capture_output=True, check=False).returncode == 2
    refused = subprocess.run([*other, "--priority-min", "101"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "`priority_min` 101 is greater than `priority_max` 100" in refused.stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0004, "1ms"), (0.012, "12ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (61.25, "1m1.25s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Bucket:
    """The algorithm in other words: ``limit`` tokens that come back evenly."""

    def __init__(self, limit: int) -> None:
        self.limit, self.left, self.at = limit, float(limit), 0.0

    def take(self, now: float, cost: int) -> bool:
        self.left = min(self.limit, self.left + (now - self.at) * self.limit / 60)
        self.at = now
        allowed = self.left >= cost - 1e-6
        self.left -= cost if allowed else 0
        return allowed


@given(limit=st.integers(1, 1000), steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 1000)), max_size=40))
async def test_a_rate_is_a_bucket_that_fills_evenly(limit: int, steps: list[tuple[float, int]]) -> None:
    limiter, bucket, now = LocalLimiter(), Bucket(limit), 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.limits.local.time.monotonic", lambda: now)
        for pause, cost in steps:
            now += pause
            verdict = await limiter.take(Lease("a", "1", Limits((None, limit, None)), Cost(1, cost, 0)))
            close = abs(min(limit, bucket.left + (now - bucket.at) * limit / 60) - cost) < 1e-3
            assert close or (verdict.denied is None) == bucket.take(now, cost)
            if close:
                return
            level = verdict.levels[1]
            assert level is not None
            assert level.remaining == pytest.approx(math.floor(bucket.left + 1e-6), abs=1)
            assert level.reset == pytest.approx((limit - bucket.left) * 60 / limit, abs=1e-3)
            if verdict.denied and math.isfinite(verdict.wait):
                assert verdict.wait == pytest.approx((cost - bucket.left) * 60 / limit, abs=1e-3)
