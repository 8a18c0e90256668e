"""Aliases and fallbacks of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.keys import by, entry, write
from tests.processes import wait_until
from yardstick_llm.gateway.settings import Settings, SettingsError

ALIASES = ("small=one", "best=two", "org/nick=one")
KEYS = {"one": ["one"], "alias": ["best"], "first": ["one"], "both": ["one", "two"]}


@pytest.fixture(scope="module")
def named() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine("one"), FakeEngine("two", "fake-2"), aliases=ALIASES)


def key_file(folder: Path) -> Path:
    return write(folder / "keys.json", *(entry(name, models=models) for name, models in KEYS.items()))


def complete(client: httpx.Client, model: str | None, key: str = "") -> httpx.Response:
    headers = by(key) if key else {}
    return client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1, "model": model}, headers=headers)


def names(client: httpx.Client, key: str = "") -> dict[str, str]:
    headers = by(key) if key else {}
    return {entry["id"]: entry["root"] for entry in client.get("/v1/models", headers=headers).json()["data"]}


def test_an_alias_is_another_name_of_a_model(named: httpx.Client) -> None:
    before = metric(named, 'yardstick_tokens_total{kind="prompt",model="one"}')
    answer = complete(named, "small")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "one"
    assert metric(named, 'yardstick_tokens_total{kind="prompt",model="one"}') == before + 2
    assert named.post("/v1/tokenize", json={"model": "org/nick", "prompt": "a"}).status_code == 200
    assert names(named) == {"one": "one", "two": "two", "small": "one", "best": "two", "org/nick": "one"}
    shown = named.get("/v1/models/org/nick").json()
    assert (shown["id"], shown["root"]) == ("org/nick", "one")
    assert complete(named, "other").json()["error"]["code"] == "model_not_found"
    assert len(complete(named, "long" * 10_000).json()["error"]["message"]) < 400


def test_keys_may_use_aliases_of_their_models(start: Start, tmp_path: Path) -> None:
    client = start(FakeEngine("one"), FakeEngine("two", "fake-2"), aliases=ALIASES, api_keys_file=key_file(tmp_path))
    assert len(complete(client, "long" * 10_000, "one").json()["error"]["message"]) < 400
    assert complete(client, "small", "one").status_code == 200
    assert complete(client, "best", "one").status_code == 404
    assert names(client, "one") == {"one": "one", "small": "one", "org/nick": "one"}
    assert complete(client, "best", "alias").json()["model"] == "two"
    assert complete(client, None, "alias").json()["model"] == "two"
    assert complete(client, "two", "alias").status_code == 404
    assert names(client, "alias") == {"best": "two"}


def test_a_fallback_takes_the_generations_of_a_model_without_engine(start: Start) -> None:
    first, second = FakeEngine("one"), FakeEngine("two", "fake-2")
    client = start(first, second, fallbacks=("one=nick", "absent=one", "two=one"), aliases=("nick=two",))
    answer = complete(client, "one")
    assert answer.json()["model"] == "one"
    assert "x-yardstick-fallback" not in answer.headers
    first.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    for asked in ("one", "absent"):
        answer = complete(client, asked)
        assert answer.json()["model"] == "two"
        assert answer.headers["x-yardstick-fallback"] == "two"
    talk = {"model": "one", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}
    streamed = client.post("/v1/chat/completions", json=talk)
    assert streamed.headers["x-yardstick-fallback"] == "two"
    assert '"model":"two"' in streamed.text
    score: dict[str, Any] = {"model": "one", "query": [1], "items": [[2]], "label_token_ids": [1]}
    assert client.post("/v1/score", json=score).status_code == 503  # numbers of another model are no substitute
    tokens = client.post("/tokenize", json={"model": "one", "prompt": "a"})
    assert "x-yardstick-fallback" not in tokens.headers
    assert metric(client, 'yardstick_fallbacks_total{fallback="two",model="one"}') == 2
    assert metric(client, 'yardstick_model_requests_without_engine_total{model="one"}') == 3, (
        "it wakes the model's pool all the same"
    )
    second.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    assert complete(client, "one").status_code == 503


def test_a_fallback_is_for_keys_that_may_use_it(start: Start, tmp_path: Path) -> None:
    first, second = FakeEngine("one"), FakeEngine("two", "fake-2")
    client = start(first, second, fallbacks=("one=two", "absent=two"), api_keys_file=key_file(tmp_path))
    first.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert complete(client, "one", "both").json()["model"] == "two"
    refused = complete(client, "one", "first")
    assert (refused.status_code, "x-yardstick-fallback" in refused.headers) == (503, False)
    unknown = complete(client, "absent", "first")
    assert unknown.status_code == 404
    assert "two" not in unknown.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"aliases": ("one",)},
        {"aliases": ("=one",)},
        {"aliases": ("a=one", "a=two")},
        {"aliases": ("a=b", "b=one")},
        {"fallbacks": ("one=one",)},
        {"fallbacks": ("one=nick",), "aliases": ("nick=one",)},
        {"fallbacks": ("nick=two",), "aliases": ("nick=one",)},
    ],
)
def test_wrong_names_are_settings_errors(wrong: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(SettingsError, match=r"YARDSTICK_(ALIASES|FALLBACKS)"):
        Settings(engines=("http://127.0.0.1:1",), **wrong)
