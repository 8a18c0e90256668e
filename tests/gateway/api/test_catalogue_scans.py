"""Requests for whole catalogues: several parts at one time, long queries, and the best items while items change."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, logprobs_after
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.catalogue_scores import PAGE_ITEMS, SLACK, Best, Result

QUERY, LABELS = [7, 8], [5, 6]
WIDE = wire.Limits(max_branches=2048, max_slots=1 << 20, max_logprobs=20, max_labels=16, max_sequences=8)


def load(client: httpx.Client, items: int, template: Any = ("{item}", "{query}")) -> None:
    client.put("/v1/catalogues/shop", json={"template": template}).raise_for_status()
    for first in range(0, items, 10 if items < 500 else 2000):
        few = range(first, min(items, first + (10 if items < 500 else 2000)))
        body = [{"id": f"i{place}", "token_ids": [20 + place % 200, 30 + place // 200, 40]} for place in few]
        client.put("/v1/catalogues/shop/items", json=body).raise_for_status()


def scan(client: httpx.Client, query: Any = QUERY, **body: Any) -> httpx.Response:
    body = {"query": query, "catalogue": "shop", "label_token_ids": LABELS} | body
    return client.post("/v1/score", json=body, timeout=60)


def rows(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.raise_for_status().text.splitlines() if line.startswith("data: {")]
    return [row for line in lines for row in json.loads(line).get("data", [])]


def test_other_engines_go_on_while_one_is_slow(start: Start) -> None:
    """Results are in the order of the catalogue all the same, and the number of parts in progress is bounded."""
    engines = [FakeEngine() for _ in range(3)]
    client = start(*engines, max_request_tokens=240)  # parts of 24 items, so that each engine has some of each
    load(client, 200)
    engines[0].faults.hold = True
    with ThreadPoolExecutor() as threads:
        scanning = threads.submit(scan, client, stream=True)
        seen = [0] * 3

        def still() -> bool:
            before = [*seen]
            seen[:] = [len(engine.item_scores) for engine in engines]
            return seen == before and sum(seen) > 0

        wait_until(still, pause=0.3)
        assert min(seen[1:]) >= 4, "each has its share of six parts"
        items = sum(len(asked.lengths) // 4 for engine in engines for asked in engine.item_scores)
        assert items <= 6 * 24, "six parts of 24 items"
        engines[0].faults.hold = False
        found = rows(scanning.result())
    assert [row["id"] for row in found] == [f"i{place}" for place in range(200)]
    for row in found[::20]:
        place = int(row["id"][1:])
        logprobs = logprobs_after([20 + place % 200, 30 + place // 200, 40, *QUERY], FakeEngine().vocab_size)
        assert row["scores"] == pytest.approx([math.exp(logprobs[label]) for label in LABELS])


def test_the_most_items_while_some_change(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that were scored already come again, and take no place from one that moved behind them before its turn."""
    items = PAGE_ITEMS + 50
    engine = FakeEngine(limits=WIDE)
    monkeypatch.setattr("yardstick_llm.gateway.api.catalogue_scores.MOST_ITEMS", items)
    client = start(engine)
    load(client, items)
    engine.faults.hold = True
    with ThreadPoolExecutor() as threads:
        scanning = threads.submit(scan, client, stream=True)
        wait_until(lambda: len(engine.running) >= 2)
        changed = [{"id": f"i{place}", "token_ids": [9, 9]} for place in (0, 1, 2, items - 1)]
        client.put("/v1/catalogues/shop/items", json=changed).raise_for_status()
        engine.faults.hold = False
        found = rows(scanning.result())
    assert {row["id"] for row in found} == {f"i{place}" for place in range(items)}
    assert [row["id"] for row in found[-4:]] == ["i0", "i1", "i2", f"i{items - 1}"]


def test_a_scan_whose_engine_is_full_ends_and_can_be_repeated(start: Start) -> None:
    engine = FakeEngine()

    class Messages(list[Any]):
        def append(self, message: Any) -> None:
            super().append(message)
            if len(self) == 3:  # the first part has been answered
                engine.faults.fail = wire.Failed("", "overloaded", "The queue is full.", retryable=True, retry_after=1.0)

    engine.item_scores = Messages()
    client = start(engine, max_request_tokens=80)
    load(client, 40)
    answer = scan(client, stream=True)
    last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
    assert 0 < len(rows(answer)) < 40
    engine.faults.fail = None
    hits, _, items = scan(client, top_n=40).raise_for_status().headers["x-yardstick-cache"].partition("/")
    assert int(hits) >= len(rows(answer))
    assert items == "40"


def test_items_that_end_differently_are_scored_with_a_long_query(start: Start) -> None:
    """Each part has the tokens of its own tails, and the bound of characters holds for a query behind each of them."""
    client = start(FakeEngine(), max_request_characters=2000)
    client.put("/v1/catalogues/shop", json={"template": "{item}{query}"}).raise_for_status()
    texts = {f"i{place}": f"fox number{place}" for place in range(40)}
    body = [{"id": id, "text": text} for id, text in texts.items()]
    client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
    query = "th" * 90
    before = metric(client, "yardstick_text_seconds_count")
    found = rows(scan(client, query, stream=True))
    assert metric(client, "yardstick_text_seconds_count") - before <= 15, "once for each part, and once for all"
    assert [row["id"] for row in found] == list(texts)
    for row in found[::7]:
        logprobs = logprobs_after(ids(texts[row["id"]] + query), FakeEngine().vocab_size)
        assert row["scores"] == pytest.approx([math.exp(logprobs[label]) for label in LABELS])


@pytest.mark.slow
@pytest.mark.parametrize("bound", [{}, {"max_scores": 50}])
def test_a_long_query_makes_parts_small(start: Start, bound: dict[str, int]) -> None:
    engine = FakeEngine(max_context=1 << 15, limits=WIDE)
    client = start(engine, **bound)
    load(client, 600)
    query = [7 + place % 100 for place in range(2200)] if "max_scores" not in bound else QUERY
    answer = scan(client, query, top_n=3).raise_for_status().json()
    assert len(answer["ids"]) == 3
    assert answer["usage"]["prompt_tokens"] == 600 * (3 + len(query))


def result(id: str, index: int, score: float) -> Result:
    return Result(index, id, (score,))


@pytest.mark.parametrize("most", [1, 3, SLACK + 5])
def test_the_best_items_are_those_of_the_last_results(most: int) -> None:
    """Items that change are scored again. One that displaced another and is worse now makes room for it again."""
    best, last = Best(lambda row: row[0], most), dict[str, float]()
    dice = random.Random(most)
    for turn in range(12):
        again = [each.id for each in best.results[:20]]
        scores = dict.fromkeys(again, -1.0) | {f"i{turn}-{place}": dice.random() for place in range(480)}
        best.add([result(id, 500 * turn + place, score) for place, (id, score) in enumerate(scores.items())])
        last |= scores
    expected = sorted(last.values(), reverse=True)[:most]
    assert [each.row[0] for each in best.results] == expected
