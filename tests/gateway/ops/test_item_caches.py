"""What engines tell of the items in their prefix caches, and the tokens that caches save."""

from __future__ import annotations

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric
from tests.prefixes import PrefixCache
from tests.processes import wait_until
from yardstick_llm.engine import wire

STATS = wire.Stats(
    running=0,
    waiting=0,
    slots_total=1000,
    slots_free=100,
    slots_cached=900,
    steps=1,
    computed_tokens=1,
    cached_tokens=1,
    slots_items=500,
    item_bytes=64_000,
    scored_items=300,
    cached_items=200,
    evicted_item_tokens=77,
)


def told(client: httpx.Client, name: str, engine: FakeEngine) -> float:
    return metric(client, f'yardstick_item_cache_{name}{{engine="{engine.url}"}}')


def test_each_engine_has_its_series(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that tells nothing, such as an older one, has none; one that is away keeps its last ones."""
    monkeypatch.setattr("yardstick_llm.gateway.pool.pool.STATS_SECONDS", 0.05)
    one, old = FakeEngine(stats=STATS), FakeEngine()
    client = start(one, old)
    wait_until(lambda: "yardstick_item_cache_tokens{" in client.get("/metrics").text)
    found = {name: told(client, name, one) for name in ("tokens", "bytes")}
    assert found == {"tokens": 500, "bytes": 64_000}
    counted = [told(client, f"{name}_total", one) for name in ("scored_items", "found_items", "evicted_tokens")]
    assert counted == [300, 200, 77]
    assert f'item_cache_tokens{{engine="{old.url}"}}' not in client.get("/metrics").text
    one.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    assert told(client, "tokens", one) == 500


def test_saved_tokens_are_those_of_both_caches(start: Start) -> None:
    client = start(FakeEngine(prefixes=PrefixCache()))
    query, items = ids(" Is it?"), [[20, 30, 40, 50], [21, 31, 41, 51]]

    def saved() -> tuple[float, float]:
        series = 'yardstick_item_first_tokens_total{{model="fake",result="{}"}}'
        return metric(client, series.format("saved")), metric(client, series.format("computed"))

    def score(query: list[int], **body: object) -> None:
        asked = {"query": query, "items": items, "item_first": True, "label_token_ids": [5]}
        client.post("/v1/score", json=asked | body).raise_for_status()

    whole = sum(map(len, items)) + 2 * len(query)
    score(query)
    assert saved() == (0, whole)
    score(query)
    assert saved() == (whole, whole), "results of the cache save whole prompts"
    score([*query, 9])
    assert saved() == (whole + 8, 2 * whole + 2 - 8), "prefix caches save the items"
    score(query, item_first=False, items=[[60]])
    assert sum(saved()) == 3 * whole + 2, "other prompts do not count"
    client.put("/v1/catalogues/shop", json={"template": ["{item}", "{query}"]}).raise_for_status()
    body = [{"id": f"i{place}", "token_ids": item} for place, item in enumerate(items)]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
    asked = {"query": [8, 9], "catalogue": "shop", "top_n": 1, "label_token_ids": [5]}
    before = saved()
    client.post("/v1/score", json=asked).raise_for_status()
    assert (saved()[0] - before[0], saved()[1] - before[1]) == (8, 4)
