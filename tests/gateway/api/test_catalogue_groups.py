"""Catalogues belong to trust groups: another group neither sees nor changes them, and nothing tells it that they exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from tests.gateway.keys import by, entry, write
from tests.prefixes import PrefixCache
from yardstick_llm.engine import wire

KEYS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {},
    "c": {"group": "search"},
    "d": {"group": "search"},
    "reader": {"group": "search", "catalogues": "read"},
    "poor": {"tokens_per_minute": 50, "items_per_minute": 5},
}
TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    file = write(tmp_path_factory.mktemp("keys") / "keys.json", *(entry(name, **more) for name, more in KEYS.items()))
    engine = FakeEngine(prefixes=PrefixCache())
    with gateways() as start:
        client = start(engine, api_keys_file=file, catalogue_bytes=400_000)
        for key in ("a", "c", "poor"):
            ask(client, key, "PUT", "/v1/catalogues/shop", {}).raise_for_status()
        register(client, "a", {f"i{number}": TEXT + str(number) for number in range(20)}).raise_for_status()
        register(client, "c", {"i0": "of c", "only": "of c"}).raise_for_status()
        yield engine, client


@pytest.fixture
def client(served: tuple[FakeEngine, httpx.Client]) -> httpx.Client:
    return served[1]


def ask(client: httpx.Client, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
    return client.request(method, path, json=body, headers=by(key))


def register(client: httpx.Client, key: str, items: dict[str, str], name: str = "shop") -> httpx.Response:
    body = [{"id": id, "text": text} for id, text in items.items()]
    return ask(client, key, "PUT", f"/v1/catalogues/{name}/items", body)


def score(client: httpx.Client, key: str, ids: list[str], query: str = " Is it?", **body: Any) -> httpx.Response:
    body = {"query": query, "catalogue": "shop", "ids": ids, "labels": [" Yes"]} | body
    return ask(client, key, "POST", "/v1/score", body)


PROBES: list[tuple[str, str, Any]] = [
    ("GET", "/v1/catalogues/shop", None),
    ("GET", "/v1/catalogues/shop/items", None),
    ("PUT", "/v1/catalogues/shop/items", [{"id": "a", "text": "b"}]),
    ("DELETE", "/v1/catalogues/shop/items?id=i0", None),
    ("DELETE", "/v1/catalogues/shop", None),
    ("POST", "/v1/score", {"query": "a", "catalogue": "shop", "ids": ["i0"], "labels": [" Yes"]}),
    ("POST", "/v1/score", {"query": "a", "catalogue": "shop", "top_n": 1, "labels": [" Yes"]}),
    ("POST", "/v1/rerank", {"query": "a", "catalogue": "shop", "ids": ["i0"]}),
]


@pytest.mark.parametrize(("method", "path", "body"), PROBES)
def test_another_group_sees_a_name_that_does_not_exist(client: httpx.Client, method: str, path: str, body: Any) -> None:
    taken, free = (
        ask(client, "b", method, path.replace("shop", name), {**body, "catalogue": name} if body and "catalogue" in body else body)
        for name in ("shop", "free")
    )
    assert taken.status_code == free.status_code == 404
    assert taken.json()["error"]["message"].replace("shop", "free") == free.json()["error"]["message"]
    assert taken.json()["error"]["code"] == "catalogue_not_found"


def test_groups_share_and_do_not_mix(client: httpx.Client) -> None:
    assert ask(client, "b", "GET", "/v1/catalogues").json()["data"] == []
    (of_a,) = ask(client, "a", "GET", "/v1/catalogues").json()["data"]
    (of_d,) = ask(client, "d", "GET", "/v1/catalogues").json()["data"]
    assert (of_a["items"], of_d["items"]) == (20, 2)
    assert score(client, "d", ["only"]).status_code == 200
    assert score(client, "a", ["only"]).json()["error"]["code"] == "item_not_found"
    assert score(client, "a", ["i0"]).json()["scores"] != score(client, "c", ["i0"]).json()["scores"]


def test_counts_tell_nothing_of_another_groups_items(served: tuple[FakeEngine, httpx.Client]) -> None:
    """Keys `a` and `b` register equal items; what `a` has scored is not cached for `b`."""
    _, client = served
    texts = {f"w{number}": f"{number} is secret: {TEXT}" for number in range(5)}
    register(client, "a", texts).raise_for_status()
    score(client, "a", list(texts), " First?").raise_for_status()
    known = score(client, "a", list(texts)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert known >= 5 * len(TEXT.split())
    ask(client, "b", "PUT", "/v1/catalogues/shop", {}).raise_for_status()
    register(client, "b", texts).raise_for_status()
    first = score(client, "b", list(texts))
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first.headers["x-yardstick-cache"] == "0/5"
    again = score(client, "b", list(texts), " And its own?")
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 5 * len(TEXT.split())
    salted = score(client, "a", list(texts), cache_salt="x")
    assert salted.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    ask(client, "b", "DELETE", "/v1/catalogues/shop").raise_for_status()


@pytest.mark.parametrize(("method", "path", "body"), list(PROBES[2:5]))
def test_a_reader_may_not_write(client: httpx.Client, method: str, path: str, body: Any) -> None:
    refused = ask(client, "reader", method, path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_permitted")
    assert ask(client, "reader", "PUT", "/v1/catalogues/other", {}).status_code == 403
    assert score(client, "reader", ["only"]).status_code == 200
    assert ask(client, "reader", "GET", "/v1/catalogues/shop").json()["items"] == 2


def test_registrations_and_whole_catalogues_count_towards_limits(client: httpx.Client) -> None:
    refused = register(client, "poor", {"long": TEXT * 20})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    register(client, "poor", {f"i{number}": "a" for number in range(6)}).raise_for_status()
    refused = ask(client, "poor", "POST", "/v1/score", {"query": "a", "catalogue": "shop", "top_n": 1, "labels": [" Yes"]})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false"), "six items a minute are too many"


def test_a_flood_of_registrations_is_bounded(client: httpx.Client) -> None:
    ask(client, "b", "PUT", "/v1/catalogues/flood", {}).raise_for_status()
    statuses = []
    for turn in range(6):
        answer = register(client, "b", {f"f{turn}-{number}": "fox" for number in range(200)}, "flood")
        statuses.append(answer.status_code)
    assert statuses[0] == 200
    assert statuses[-1] == 413
    error = answer.json()["error"]
    assert (error["code"], "Delete items" in error["message"]) == ("store_full", True)
    assert answer.headers["x-should-retry"] == "false"
    state = ask(client, "b", "GET", "/v1/catalogues/flood").json()
    assert 0.9 * 200_000 < state["bytes"] <= 200_000
    register(client, "a", {"after": "the flood"}).raise_for_status()
    for number in range(120):
        answer = ask(client, "b", "PUT", f"/v1/catalogues/more-{number}", {})
        if not answer.is_success:
            break
    assert answer.status_code == 413, "empty catalogues take room too"
    ask(client, "b", "DELETE", "/v1/catalogues/flood").raise_for_status()


def test_engines_learn_no_ids(served: tuple[FakeEngine, httpx.Client]) -> None:
    engine, client = served
    engine.item_scores.clear()
    score(client, "c", ["only", "i0"], " New?").raise_for_status()
    (asked,) = engine.item_scores
    assert isinstance(asked, wire.ScoreItems)
    assert "only" not in repr(asked)
    assert "shop" not in repr(asked)
