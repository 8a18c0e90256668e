"""Two pods that share a model are one engine: its scores, its readiness, its restarts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import READY_SECONDS, Release, wait_for
from tests.cluster.chart.load import LABELS
from tests.helm.chart import Values

pytestmark = pytest.mark.slow

POOL: Values = {
    "servedName": "grouped",
    "groupKind": "StatefulSet",
    "groupSize": 2,
    "tensorParallel": 2,
    "device": "cpu",
    "replicas": 1,
}
RANKS = [f"yardstick-engine-pair-rank-{rank}" for rank in range(2)]
ITEMS = [f"shoe {i}\nRelevant:" for i in range(6)]


@pytest.fixture
def group(release: Release) -> Iterator[None]:
    release.upgrade({"pools": {"pair": POOL}})
    try:
        for rank in RANKS:
            release.rolled_out(rank)
        yield
    finally:
        release.upgrade({"pools": {"pair": POOL | {"enabled": False}}})


def test_two_pods_give_the_scores_of_one_and_restart_together(ingress: IngressProxy, release: Release, group: None) -> None:
    headers = {"host": ingress.host, "authorization": f"Bearer {release.key}", "cache-control": "no-cache"}
    with httpx.Client(base_url=ingress.url, headers=headers, timeout=60) as client:

        def scores(model: str) -> list[float]:
            body = {"model": model, "query": "Query: red shoes\nItem: ", "items": ITEMS, "labels": LABELS}
            answer = client.post("/v1/score", json=body).raise_for_status().json()
            return [score for item in answer["scores"] for score in item]

        alone = scores("yardstick-demo")
        assert scores("grouped") == pytest.approx(alone, abs=1e-5)
        first, second = (f"{rank}-0" for rank in RANKS)
        addresses = release.core.read_namespaced_endpoints("yardstick-engine-pair", release.namespace).subsets[0].addresses
        assert [address.target_ref.name for address in addresses] == [first]
        for grace in (None, 0):  # it drains, or it is killed
            release.delete_pod(second, grace)
            wait_for(lambda: not release.ready(first), 60, "rank 0 is not ready without rank 1")
            wait_for(lambda: release.ready(first) and release.ready(second), READY_SECONDS, "both are ready again")
            assert scores("grouped") == pytest.approx(alone, abs=1e-5)
