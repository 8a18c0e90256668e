"""Items stay with the replicas that keep them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from tests.fakes import FakeEngine, joined, logprobs_after
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.gateway.pool import placement
from yardstick_llm.gateway.pool.placement import assign, item_digests
from yardstick_llm.gateway.pool.replica import Replica

LABELS = [3, 4]


def replicas(count: int) -> list[Replica]:
    return [Replica(cast(Any, SimpleNamespace(url=f"http://engine-{number}:8000"))) for number in range(count)]


def owners(pods: list[Replica], digests: list[int], tokens: int = 1) -> list[str]:
    groups = asyncio.run(assign(pods, digests, [tokens] * len(digests)))
    owner = {place: pod.client.url for pod, group in zip(pods, groups, strict=True) for place in group}
    return [owner[place] for place in range(len(digests))]


def test_each_replica_gets_its_share_and_a_new_one_moves_only_its_own() -> None:
    digests = list(item_digests([[number] for number in range(4000)], ""))
    before, after = owners(replicas(4), digests), owners(replicas(5), digests)
    for url in set(before):
        assert before.count(url) == pytest.approx(1000, abs=5 * math.sqrt(750))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"http://engine-4:8000"}
    assert len(moved) == pytest.approx(800, abs=5 * math.sqrt(640))


def test_items_of_a_busy_replica_go_elsewhere() -> None:
    digests = list(item_digests([[number] for number in range(400)], ""))
    pods = replicas(2)
    free = owners(pods, digests)
    pods[0].tokens = 100 * placement.SLACK_TOKENS
    busy = owners(pods, digests)
    assert set(busy) == {"http://engine-1:8000"}
    assert set(free) == {"http://engine-0:8000", "http://engine-1:8000"}


@pytest.mark.parametrize(("count", "tokens"), [(2, 1), (4, placement.SLACK_TOKENS), (4, 27_000), (16, 1_000_000)])
def test_a_long_item_goes_where_it_belongs_on_an_idle_fleet(count: int, tokens: int) -> None:
    """Each request has one item, and the one before it has ended."""
    pods, digests = replicas(count), list(item_digests([[number] for number in range(400)], ""))
    free = owners(pods, digests, 0)
    assert [owners(pods, [digest], tokens)[0] for digest in digests] == free
    assert len(set(free)) == count


def test_one_request_is_divided_within_the_bound() -> None:
    """Even if all items prefer one replica."""
    pods = replicas(2)
    digests = [digest for digest in item_digests([[number] for number in range(1000)], "") if owners(pods, [digest])[0][14] == "0"]
    counts = [len(group) for group in asyncio.run(assign(pods, digests, [1000] * len(digests)))]
    assert min(counts) > 0.2 * sum(counts)


@dataclass
class Two:
    """A gateway before two engines."""

    client: httpx.Client
    engines: list[FakeEngine] = field(default_factory=list)

    def score(self, query: list[int], items: list[list[int]]) -> list[list[float]]:
        body = {"query": query, "items": items, "label_token_ids": LABELS, "item_first": True}
        answer = self.client.post("/v1/score", json=body, headers={"cache-control": "no-cache"})
        assert answer.status_code == 200, answer.text
        found: list[list[float]] = answer.json()["scores"]
        return found

    def placed(self) -> list[set[tuple[int, ...]]]:
        """The prompts that each engine got, without the query."""
        return [
            {tuple(prompt[: -len(message.query)]) for message in engine.item_scores for prompt in joined(message).branches}
            for engine in self.engines
        ]


@pytest.fixture
def two(start: Start) -> Two:
    engines = [FakeEngine(), FakeEngine()]
    return Two(start(*engines, wait_seconds=5), engines)


def test_an_item_goes_to_one_engine_with_every_query(two: Two) -> None:
    items = [[number % 50, number % 7, number // 50] for number in range(60)]
    for query in ([5, 6], [7], [8, 9, 10]):
        scores = two.score(query, items)
        for item, row in zip(items, scores, strict=True):
            logprobs = logprobs_after(item + query, two.engines[0].vocab_size)
            assert row == [pytest.approx(math.exp(logprobs[label])) for label in LABELS]
    first, second = two.placed()
    assert first
    assert second
    assert not first & second
    assert len(first | second) == 60


def test_items_of_a_lost_engine_are_scored_by_the_other(two: Two) -> None:
    items = [[number % 50, 3, number // 50] for number in range(60)]
    before = two.score([5, 6], items)
    two.engines[0].faults.break_after = 0
    assert two.score([5, 6], items) == before
    two.engines[0].ready = False
    wait_until(lambda: metric(two.client, "yardstick_engines_ready") == 1)
    assert two.score([5, 6], items) == before


def test_a_request_that_keeps_nothing_is_divided_evenly(two: Two) -> None:
    items = [[number % 50, number // 50] for number in range(100)]
    body = {"query": [5], "items": items, "label_token_ids": LABELS, "item_first": True}
    assert two.client.post("/v1/score", json=body, headers={"cache-control": "no-store"}).status_code == 200
    assert all(not message.caller.keep_prefix for engine in two.engines for message in engine.item_scores)
