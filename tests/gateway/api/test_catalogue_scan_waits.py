"""Requests for whole catalogues while their only engine is away for a while, on real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.catalogue_scores import MOST_LOSSES

ITEMS, QUERY, LABELS = 40, [7, 8], [5, 6]
AWAY = wire.Failed("", "not_ready", "The loop does not answer.", retryable=True, retry_after=1.0)
FULL = wire.Failed("", "overloaded", "The queue is full.", retryable=True, retry_after=1.0)


class Trouble(list[Any]):
    """Does something when the third message arrives; the first part of a scan has been answered by then."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def append(self, message: Any) -> None:
        super().append(message)
        if len(self) == 3:
            self._begin()


def unready(engine: FakeEngine) -> None:
    engine.ready, engine.faults.fail = False, AWAY


def full(engine: FakeEngine) -> None:
    engine.faults.fail = FULL


def breaking(engine: FakeEngine) -> None:
    engine.faults.break_after = 0


def recovered(engine: FakeEngine) -> None:
    engine.faults.fail = engine.faults.break_after = None
    engine.ready = True


def started(start: Start, engine: FakeEngine) -> httpx.Client:
    """Return a client of a gateway with a catalogue that is scored in several parts."""
    client = start(engine, max_request_tokens=80)
    client.put("/v1/catalogues/shop", json={"template": ["{item}", "{query}"]}).raise_for_status()
    for first in range(0, ITEMS, 10):
        items = [{"id": f"i{place}", "token_ids": [20 + place, 30, 40]} for place in range(first, first + 10)]
        client.put("/v1/catalogues/shop/items", json=items).raise_for_status()
    return client


def scan(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/score", json={"query": QUERY, "catalogue": "shop", "label_token_ids": LABELS} | body)


def streamed(answer: httpx.Response) -> tuple[list[Any], Any]:
    """Return the results of a stream, and its error."""
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [row for event in events for row in event.get("data", [])], events[-1].get("error")


def retries(client: httpx.Client, code: str) -> float:
    return metric(client, f'yardstick_engine_retries_total{{code="{code}",model="fake"}}')


@pytest.mark.parametrize(
    ("trouble", "code", "times"), [(unready, "not_ready", 4), (full, "overloaded", 2), (breaking, "engine_lost", 2)]
)
def test_a_scan_goes_on_when_its_only_engine_is_back(
    start: Start, trouble: Callable[[FakeEngine], None], code: str, times: int
) -> None:
    engine = FakeEngine()
    engine.item_scores = Trouble(lambda: trouble(engine))
    client = started(start, engine)
    with ThreadPoolExecutor() as threads:
        scanning = threads.submit(scan, client, stream=True)
        wait_until(lambda: retries(client, code) >= times)
        recovered(engine)
        found, error = streamed(scanning.result())
    assert error is None
    ids = sorted(row["id"] for row in found)
    assert ids == sorted(f"i{place}" for place in range(ITEMS)), "each item once"
    some = {row["id"]: row["scores"] for row in found if row["id"] in ids[::4]}
    assert [*some.values()] == scan(client, ids=[*some]).raise_for_status().json()["scores"]


def test_an_engine_that_stays_away_ends_the_scan(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.gateway.api.catalogue_scores.WAIT_SECONDS", 0.3)
    engine = FakeEngine()
    engine.item_scores = Trouble(lambda: unready(engine))
    found, error = streamed(scan(started(start, engine), stream=True))
    assert error["code"] == "not_ready"
    assert 0 < len(found) < ITEMS


def test_a_part_that_breaks_engines_is_sent_a_few_times(start: Start) -> None:
    engine = FakeEngine()
    engine.item_scores = Trouble(lambda: breaking(engine))
    _, error = streamed(scan(started(start, engine), stream=True))
    assert error["code"] == "engine_lost"
    assert len(engine.item_scores) <= 3 + 2 * 2 * MOST_LOSSES, "two messages of each of two parts at one time"


def test_a_scan_that_has_no_results_yet_is_refused_at_once(start: Start) -> None:
    engine = FakeEngine()
    client = started(start, engine)
    unready(engine)
    answer = scan(client, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
