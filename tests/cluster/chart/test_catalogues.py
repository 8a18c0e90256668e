"""Registered items while engines are killed, come and go: no request fails, every score stays the same, and few items move."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Self

import httpx
import pytest

from tests.cluster.chart.drills import ENGINES, KILL
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.load import LABELS, PAUSE

COUNT = 200
ASKED = [f"i{place}" for place in range(COUNT // 2)]
"""Items that the load asks for. Only :meth:`Shop.cached` asks for the others, so what engines have of them shows where they are."""
OTHERS = [f"i{place}" for place in range(COUNT // 2, COUNT)]
QUERIES = ["red shoes", "an oak table for six", "a warm jacket"]
MOST_MOVED = 0.75
"""Largest part of 100 items that may move when engines are doubled: each moves with probability 1/2, and this is five standard
deviations more."""


class Shop:
    """A catalogue, and a client of it."""

    def __init__(self, ingress: IngressProxy, release: Release) -> None:
        self._headers = {"host": ingress.host, "authorization": f"Bearer {release.key}"}
        self._url = ingress.url
        self.client = self.connect()
        form = {"template": "Item: {item}\nQuery: {query}\nRelevant:", "labels": LABELS}
        self.client.put("/v1/catalogues/shop", json=form).raise_for_status()
        items = [{"id": f"i{place}", "text": f"Product {place} of the shop, number {place * 7919}"} for place in range(COUNT)]
        self.client.put("/v1/catalogues/shop/items", json=items).raise_for_status()

    def connect(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers=self._headers | {"cache-control": "no-cache"}, timeout=60)

    def scores(self, query: str, ids: list[str], client: httpx.Client | None = None) -> list[list[float]]:
        body = {"query": query, "catalogue": "shop", "ids": ids}
        scores: list[list[float]] = (client or self.client).post("/v1/score", json=body).raise_for_status().json()["scores"]
        return scores

    def everything(self) -> dict[str, dict[str, list[float]]]:
        """Scores of all items, by query and id."""
        ids = ASKED + OTHERS
        return {query: dict(zip(ids, self.scores(query, ids), strict=True)) for query in QUERIES}

    def cached(self) -> int:
        """Score the items in :data:`OTHERS`, after which engines have them; return how many of their tokens engines had before."""
        body = {"query": "anything", "catalogue": "shop", "ids": OTHERS}
        usage = self.client.post("/v1/score", json=body).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


class Load:
    """Between entering and leaving, two callers score items and compare."""

    def __init__(self, shop: Shop, expected: dict[str, dict[str, list[float]]]) -> None:
        self._shop, self._expected = shop, expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed),)) for seed in range(2)]
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)

    def goes_on(self) -> None:
        before = self.answered
        wait_for(lambda: self.answered > before + 10, 60, "requests are answered")

    def _run(self, choices: random.Random) -> None:
        with self._shop.connect() as client:
            while not self._stop.is_set():
                time.sleep(PAUSE)
                query, ids = choices.choice(QUERIES), choices.sample(ASKED, 10)
                try:
                    found = self._shop.scores(query, ids, client)
                except httpx.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    continue
                if found != [pytest.approx(self._expected[query][id], abs=1e-5) for id in ids]:
                    self.failures.append(f"other scores of {ids} with {query!r}: {found}")
                self.answered += 1


def engines_known(release: Release, count: int) -> bool:
    return all(release.gateway_metric(pod, "yardstick_engines_ready") == count for pod in release.pods("gateway"))


def restarts(release: Release) -> int:
    status = release.core.read_namespaced_pod_status("yardstick-engine-0", release.namespace).status
    return int(status.container_statuses[0].restart_count)


@pytest.fixture
def shop(ingress: IngressProxy, release: Release) -> Iterator[Shop]:
    """Before two engines, which there are after the test as well."""
    shop = Shop(ingress, release)
    yield shop
    shop.client.close()
    release.scale(ENGINES, 2)
    release.rolled_out(ENGINES)


def test_scores_of_a_catalogue_stay_the_same(shop: Shop, release: Release) -> None:
    expected = shop.everything()
    with Load(shop, expected) as load:
        load.goes_on()
        killed = restarts(release)
        release.run_in("yardstick-engine-0", "python", "-c", KILL)
        load.goes_on()
        wait_for(lambda: restarts(release) > killed, 60, "the engine is started again")
        wait_for(lambda: engines_known(release, 2), 60, "the engine is back")
        shop.cached()
        whole = shop.cached()
        assert whole > len(OTHERS)
        assert shop.cached() >= 0.95 * whole, "where engines are the same, items are too"
        release.scale(ENGINES, 4)
        wait_for(lambda: engines_known(release, 4), 120, "four engines")
        load.goes_on()
        moved = 1 - shop.cached() / whole
        assert 0 < moved <= MOST_MOVED
        release.scale(ENGINES, 2)
        wait_for(lambda: engines_known(release, 2), 60, "two engines")
        load.goes_on()
        assert shop.cached() >= 0.95 * whole, "the engines that stay still have theirs"
    assert load.failures == []
    assert shop.everything() == {
        query: {id: pytest.approx(row, abs=1e-5) for id, row in rows.items()} for query, rows in expected.items()
    }
