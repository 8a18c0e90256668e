"""Restrictions of a key: models, limits, expiry; and changes of the key file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.keys import COMPLETION, ask, by, entry, write

KEYS: dict[str, dict[str, Any]] = {
    "three": {"requests_per_minute": 3, "tokens_per_minute": 1000},
    "free": {},
    "items": {"items_per_minute": 4},
    "whole": {"tokens_per_minute": 1000},
    "streamed": {"tokens_per_minute": 1000},
    "two at a time": {"concurrency": 2},
    "sdk": {"requests_per_minute": 30},
    "past": {"expires": (datetime.now(UTC) - timedelta(days=1)).isoformat()},
    "future": {"expires": (datetime.now(UTC) + timedelta(days=1)).isoformat()},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """An engine, and a client of a gateway with :data:`KEYS` before it."""
    engine = FakeEngine()
    file = write(tmp_path_factory.mktemp("keys") / "keys", *(entry(name, **limits) for name, limits in KEYS.items()))
    with gateways() as start:
        yield engine, start(engine, api_keys_file=file, metrics_names=True)


def test_requests_run_out_and_the_answer_says_when_they_are_back(client: httpx.Client) -> None:
    answers = [ask(client, "three") for _ in range(4)]
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
    assert metric(client, 'yardstick_limited_total{key="three",limit="requests"}') == 1
    assert ask(client, "free").status_code == 200, "each key has its own"
    assert not any(name.startswith("x-ratelimit") for name in ask(client, "free").headers)


def test_items_are_counted_and_a_request_may_be_too_large_for_ever(client: httpx.Client) -> None:
    assert ask(client, "items").headers["x-ratelimit-remaining-items"] == "2"
    refused = ask(client, "items", items=[[item] for item in range(5)])
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert "this request needs 5" in refused.json()["error"]["message"]
    assert ask(client, "items").status_code == 200, "what was refused cost nothing"
    assert ask(client, "items").status_code == 429


@pytest.mark.parametrize(("key", "stream"), [("whole", False), ("streamed", True)])
def test_tokens_are_charged_as_expected_and_settled_as_used(
    client: httpx.Client, engine: FakeEngine, key: str, stream: bool
) -> None:
    engine.says = ids("red")
    answer = ask(client, key, "completions", max_tokens=500, stream=stream)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 504)
    used = 4 + len(ids("red")) + 1
    again = ask(client, key, "completions", max_tokens=500, stream=stream)
    assert int(again.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(1000 - 504 - used, abs=3)
    assert ask(client, key, "completions", max_tokens=999).status_code == 429
    chat = {"messages": [{"role": "user", "content": "a"}]}
    limits = client.post("/v1/chat/completions", json=chat, headers=by(key))
    assert limits.status_code == 429, "an answer without a limit is expected to have 1024 tokens"


def test_concurrency_is_of_requests_under_way(client: httpx.Client, engine: FakeEngine) -> None:
    key, engine.faults.delay = "two at a time", 0.5
    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(lambda item: ask(client, key, query=[2], items=[[item]]).status_code, range(4)))
    assert statuses == [200, 200, 429, 429]
    engine.faults.delay = 0
    assert ask(client, key, query=[2], items=[[9]]).status_code == 200
    with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}, headers=by(key)) as answer:
        assert answer.status_code == 200
    assert ask(client, key, query=[2], items=[[10]]).status_code == 200


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


def test_an_expired_key_is_told_so(client: httpx.Client) -> None:
    refused = ask(client, "past")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "api_key_expired"
    assert "expired on" in refused.json()["error"]["message"]
    assert ask(client, "future").status_code == 200
