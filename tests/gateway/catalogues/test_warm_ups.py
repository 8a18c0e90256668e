"""Warm-ups of catalogues: what they cost, how they wait for engines, adapters, and their progress in the description."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.routes.catalogue_warm import PART_TOKENS
from tests.fakes import FakeEngine, adapter
from tests.gateway.catalogues.test_scan_waits import Trouble, breaking, full, recovered, retries, unready
from tests.gateway.conftest import Start
from tests.prefixes import PrefixCache
from tests.processes import wait_until

TEXT = "the quick brown fox jumps over the lazy dog "


def load(client: httpx.Client, items: int = 40, **headers: str) -> None:
    client.put("/v1/catalogues/shop", json={"template": "{item}\nQ: {query}"}, headers=headers).raise_for_status()
    for first in range(0, items, 10):
        body = [{"id": f"i{place}", "text": TEXT + str(place)} for place in range(first, first + 10)]
        client.put("/v1/catalogues/shop/items", json=body, headers=headers).raise_for_status()


def warm(client: httpx.Client, headers: Any = None, **body: Any) -> httpx.Response:
    return client.post("/v1/catalogues/shop/warm", json=body, headers=headers, timeout=60)


def described(client: httpx.Client) -> dict[str, Any]:
    return client.get("/v1/catalogues/shop").raise_for_status().json()


def test_some_items_cost_their_own_tokens(start: Start, tmp_path: Path) -> None:
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "group": "g"} for name in ("rich", "poor")]
    keys[1]["tokens_per_minute"] = 300  # type: ignore[assignment]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    client = start(FakeEngine(prefixes=PrefixCache()), api_keys_file=tmp_path / "keys.json")
    rich, poor = ({"authorization": f"Bearer {name}"} for name in ("rich", "poor"))
    load(client, **rich)
    answer = warm(client, poor, ids=["i1", "i2"])
    assert answer.status_code == 200
    assert 200 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 290
    refused = warm(client, poor)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false"), "the whole catalogue has more tokens"


def test_some_items_of_a_catalogue_that_is_too_large_for_one_request(start: Start) -> None:
    client = start(FakeEngine(), catalogue_request_items=20)
    load(client)
    refused = warm(client)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ids")
    assert "Name some of them in `ids`" in refused.json()["error"]["message"]
    assert warm(client, ids=[f"i{place}" for place in range(40)]).json()["items"] == 40


def test_an_empty_item(start: Start) -> None:
    """It has no token before its query, and no other item is left out because of it."""
    engine = FakeEngine(prefixes=PrefixCache())
    client = start(engine)
    client.put("/v1/catalogues/shop", json={}).raise_for_status()
    body = [{"id": "empty", "text": ""}, {"id": "fox", "text": TEXT}]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
    assert warm(client).raise_for_status().json()["items"] == 2
    assert warm(client, ids=["empty"]).raise_for_status().json()["items"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_long_list_of_items(start: Start, request: pytest.FixtureRequest, shared: bool, stream: bool) -> None:
    """A text worker decodes the list, and then serves others: the warm-up reads the tokens behind the items of each part."""
    settings = {"redis_url": request.getfixturevalue("redis").url, "redis_seconds": 5.0} if shared else {}
    client = start(FakeEngine(prefixes=PrefixCache()), **settings)
    client.put("/v1/catalogues/shop", json={"template": "{item}{query}"}).raise_for_status()
    names = [f"{place:04d}-{'x' * 110}" for place in range(400)]
    body = [{"id": id, "text": f"{20 * TEXT}{place}"} for place, id in enumerate(names)]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
    assert described(client)["tokens"] > PART_TOKENS, "there are several parts"
    answer = warm(client, ids=names, stream=stream).raise_for_status()
    assert '"error"' not in answer.text
    told = described(client)["warm_up"]
    assert (told["state"], told["items"]) == ("done", 400)


@pytest.mark.parametrize(
    ("trouble", "code", "times"), [(unready, "not_ready", 3), (full, "overloaded", 2), (breaking, "engine_lost", 2)]
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_warm_up_goes_on_when_engines_are_back(
    start: Start, trouble: Callable[[FakeEngine], None], code: str, times: int, at: int
) -> None:
    engine = FakeEngine(prefixes=PrefixCache())
    client = start(engine, max_request_tokens=400)
    load(client)
    engine.item_scores = Trouble(lambda: trouble(engine))
    engine.item_scores.extend([None] * (3 - at))
    with ThreadPoolExecutor() as threads:
        warming = threads.submit(warm, client)
        wait_until(lambda: retries(client, code) >= times)
        assert described(client)["warm_up"]["state"] == "running"
        recovered(engine)
        done = warming.result().raise_for_status().json()
    assert (done["items"], done["total"], done["done"]) == (40, 40, True), "each item is counted once"
    assert described(client)["warm_up"]["state"] == "done"


def test_a_part_that_was_computed_in_part_goes_on_with_the_rest(start: Start) -> None:
    """One engine answers and the other is full: only the items of the second are sent again."""
    engines = [FakeEngine(prefixes=PrefixCache()) for _ in range(2)]
    client = start(*engines, wait_seconds=0)
    load(client)
    full(engines[0])
    full(engines[1])
    with ThreadPoolExecutor() as threads:
        warming = threads.submit(warm, client)
        wait_until(lambda: retries(client, "overloaded") >= 2)
        for engine in engines:
            engine.scores.clear()
            recovered(engine)
        assert warming.result().raise_for_status().json()["items"] == 40
    assert sum(len(score.branches) for engine in engines for score in engine.scores) == 40


def test_other_engines_go_on_while_one_is_slow(start: Start) -> None:
    """They compute their shares of two parts, and no more."""
    engines = [FakeEngine(prefixes=PrefixCache()) for _ in range(3)]
    client = start(*engines, max_request_tokens=1600)
    load(client, 100)
    engines[0].faults.hold = True
    with ThreadPoolExecutor() as threads:
        warming = threads.submit(warm, client)
        for engine in engines[1:]:
            wait_until(lambda engine=engine: len(engine.item_scores) >= 2)
        wait_until(lambda: bool(engines[0].running))
        time.sleep(0.2)
        assert [len(engine.item_scores) for engine in engines[1:]] == [2, 2]
        engines[0].faults.hold = False
        done = warming.result().raise_for_status().json()
    assert (done["items"], done["done"]) == (100, True)
    assert sum(len(score.branches) for engine in engines for score in engine.scores) == 100


def test_an_engine_that_stays_full_ends_the_warm_up(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, scan_wait_seconds=0.3)
    load(client)
    full(engine)
    answer = warm(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    told = described(client)["warm_up"]
    assert (told["state"], told["items"], told["total"]) == ("stopped", 0, 40)


def test_progress_is_told_to_every_client(start: Start) -> None:
    engine = FakeEngine(prefixes=PrefixCache())
    client = start(engine)
    load(client)
    assert described(client)["warm_up"] is None
    engine.faults.hold = True
    with ThreadPoolExecutor() as threads:
        warming = threads.submit(warm, client)
        wait_until(lambda: bool(engine.running))
        told = described(client)["warm_up"]
        assert (told["state"], told["model"], told["total"]) == ("running", "fake", 40)
        engine.faults.hold = False
        done = warming.result().json()
    told = described(client)["warm_up"]
    assert told["state"] == "done"
    for name in ("items", "total", "cached_items", "computed_tokens", "pinned_items"):
        assert told[name] == done[name]
    assert described(client)["warmed_version"] == described(client)["version"]
    (listed,) = client.get("/v1/catalogues").json()["data"]
    assert listed["warm_up"] == told


def test_an_adapter_of_another_version_of_the_model(start: Start) -> None:
    """During a roll-out, the engines that have the adapter may serve another version than most engines of the model."""
    engines = [FakeEngine("one", "one-1"), FakeEngine("one", "one-2", adapters={"red": adapter("aa11", "red")})]
    client = start(engines[0], engines[1], FakeEngine("one", "one-1"), FakeEngine("two"))
    wait_until(lambda: "red" in {each["id"] for each in client.get("/v1/models").json()["data"]})
    client.put("/v1/catalogues/shop", json={"model": "one"}).raise_for_status()
    client.put("/v1/catalogues/shop/items", json=[{"id": "i0", "text": TEXT}]).raise_for_status()
    assert warm(client, model="red").raise_for_status().json()["items"] == 1
    refused = warm(client, model="two")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_items_are_warmed_for_an_adapter(start: Start) -> None:
    red = adapter("aa11", "red")
    engine = FakeEngine("one", "one-1", adapters={"red": red}, prefixes=PrefixCache())
    client = start(engine)
    wait_until(lambda: "red" in {each["id"] for each in client.get("/v1/models").json()["data"]})
    load(client)
    assert warm(client, model="red").raise_for_status().json()["items"] == 40
    assert {asked.adapter for asked in engine.item_scores} == {red.digest}
    told = described(client)
    assert (told["warm_up"]["model"], told["warmed_version"]) == ("red", None), "the model itself has no items yet"
    assert warm(client, model="nobody").status_code == 404
    engine.item_scores.clear()
    warm(client).raise_for_status()
    assert {asked.adapter for asked in engine.item_scores} == {""}
    assert described(client)["warmed_version"] is not None
