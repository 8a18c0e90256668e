"""Concurrent registrations and scores: no score is that of an item's version before the last one that was confirmed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fakes import FakeEngine, logprobs_after
from tests.gateway.conftest import gateways
from tests.prefixes import PrefixCache
from tests.redis import RedisServer

ITEMS, VERSIONS, READERS = 6, 10, 2
QUERY, LABELS = [7, 8], [5, 6]


@pytest.fixture(params=["memory", "redis"])
def clients(request: pytest.FixtureRequest) -> Iterator[list[httpx.Client]]:
    """A gateway with a catalogue in its memory, or two that share it and their cached results in Redis."""
    engine = FakeEngine(prefixes=PrefixCache())
    with gateways() as start:
        if request.param == "memory":
            yield [start(engine)]
            return
        with RedisServer.start() as redis:
            found = [start(engine, redis_url=redis.url, redis_seconds=5) for _ in range(2)]
            yield found


def item(place: int, version: int) -> list[int]:
    """Token ids of a version of an item. The items of one place begin with the same tokens."""
    return [20 + place, 30, 40 + version]


def scores(place: int, version: int) -> list[float]:
    logprobs = logprobs_after([*item(place, version), *QUERY], FakeEngine().vocab_size)
    return [math.exp(logprobs[label]) for label in LABELS]


class Race:
    """Which versions are registered, and requests that register and score."""

    def __init__(self, clients: list[httpx.Client]) -> None:
        self.clients = clients
        self.expected = [[scores(place, version) for version in range(VERSIONS)] for place in range(ITEMS)]
        self.sent, self.confirmed = [0] * ITEMS, [0] * ITEMS
        self.ended = threading.Event()

    def register(self, client: httpx.Client, places: range, version: int) -> None:
        """Register a version of some items, with one request."""
        for place in places:
            self.sent[place] = version
        body = [{"id": f"i{place}", "token_ids": item(place, version)} for place in places]
        client.put("/v1/catalogues/shop/items", json=body).raise_for_status()
        for place in places:
            self.confirmed[place] = version

    def score(self, client: httpx.Client) -> None:
        """Score all items; compare each with the versions that it may have had during the request."""
        least = [*self.confirmed]
        body = {"query": QUERY, "catalogue": "shop", "ids": [f"i{place}" for place in range(ITEMS)], "label_token_ids": LABELS}
        rows = client.post("/v1/score", json=body).raise_for_status().json()["scores"]
        most = [*self.sent]
        for place, row in enumerate(rows):
            allowed = self.expected[place][least[place] : most[place] + 1]
            assert any(row == pytest.approx(each) for each in allowed), (place, least[place], most[place])

    def write(self, number: int) -> None:
        """Register the versions of one half of the items one after the other, and score after each."""
        with httpx.Client(base_url=self.clients[number % len(self.clients)].base_url, timeout=20) as client:
            for version in range(1, VERSIONS):
                self.register(client, range(number * ITEMS // 2, (number + 1) * ITEMS // 2), version)
                self.score(client)

    def read(self, number: int) -> int:
        """Score until the last version is registered; return how often."""
        reads = 0
        with httpx.Client(base_url=self.clients[number % len(self.clients)].base_url, timeout=20) as client:
            while not self.ended.is_set():
                self.score(client)
                reads += 1
        return reads


@pytest.mark.slow
def test_scores_are_not_older_than_confirmed_registrations(clients: list[httpx.Client]) -> None:
    clients[0].put("/v1/catalogues/shop", json={"template": ["{item}", "{query}"]}).raise_for_status()
    race = Race(clients)
    race.register(clients[0], range(ITEMS), 0)
    with ThreadPoolExecutor(READERS + 2) as threads:
        readers = [threads.submit(race.read, number) for number in range(READERS)]
        writers = [threads.submit(race.write, number) for number in range(2)]
        try:
            for writer in writers:
                writer.result(60)
        finally:
            race.ended.set()
        assert all(reader.result(20) > 3 for reader in readers)
    assert race.confirmed == [VERSIONS - 1] * ITEMS
    for client in clients:
        race.score(client)
