"""Groups of two pods that share a model are one engine each: scores, readiness, restarts, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import httpx
import pytest

from tests.cluster.chart.drills import undisturbed
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
    "replicas": 2,
}
RANKS = [f"yardstick-engine-pair-rank-{rank}" for rank in range(2)]
GROUPS = [[f"{rank}-{group}" for rank in RANKS] for group in range(2)]
ITEMS = [f"shoe {i}\nRelevant:" for i in range(6)]

Scores = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def groups(release: Release) -> Iterator[None]:
    release.upgrade({"pools": {"pair": POOL}})
    try:
        for rank in RANKS:
            release.rolled_out(rank)
        yield
    finally:
        release.upgrade({"pools": {"pair": POOL | {"enabled": False}}})


@pytest.fixture
def scores(ingress: IngressProxy, release: Release, groups: None) -> Iterator[Scores]:
    """Computes the scores of a model's engine, without the cache."""
    headers = {"host": ingress.host, "authorization": f"Bearer {release.key}", "cache-control": "no-cache"}
    with httpx.Client(base_url=ingress.url, headers=headers, timeout=60) as client:

        def ask(model: str) -> list[float]:
            body = {"model": model, "query": "Query: red shoes\nItem: ", "items": ITEMS, "labels": LABELS}
            answer = client.post("/v1/score", json=body).raise_for_status().json()
            return [score for item in answer["scores"] for score in item]

        yield ask


def counted_by_gateways(release: Release, engines: int) -> bool:
    """Whether the metrics of every gateway show this number of ready engines for the model of the groups."""
    metric = 'yardstick_model_engines_ready{model="grouped"}'
    return {release.gateway_metric(gateway, metric) for gateway in release.pods("gateway")} == {engines}


def test_two_pods_are_one_engine_with_the_scores_of_one_pod(release: Release, scores: Scores) -> None:
    wait_for(lambda: counted_by_gateways(release, 2), 20, "gateways count an engine for each group")
    assert scores("grouped") == pytest.approx(scores("yardstick-demo"), abs=1e-5)
    addresses = release.core.read_namespaced_endpoints("yardstick-engine-pair", release.namespace).subsets[0].addresses
    assert {address.target_ref.name for address in addresses} == {group[0] for group in GROUPS}


@pytest.mark.parametrize(("rank", "how"), [(1, "evicted"), (1, "killed"), (0, "killed")])
def test_a_group_that_loses_a_pod_restarts_as_a_whole_and_the_other_answers(
    ingress: IngressProxy, release: Release, scores: Scores, rank: int, how: Literal["evicted", "killed"]
) -> None:
    other, group = GROUPS
    lost, left = group[rank], group[1 - rank]
    with undisturbed(ingress, release, model="grouped"):
        if how == "evicted":
            assert release.evict(lost)
            assert not any(release.evict(pod) for pod in other), "the budget allows one group at a time"
        else:
            release.delete_pod(lost, grace_seconds=0)
        wait_for(lambda: not release.ready(left), 60, f"{left} is not ready without {lost}")
        wait_for(lambda: counted_by_gateways(release, 1), 20, "gateways count the other group only")
        assert all(release.ready(pod) for pod in other)
        wait_for(lambda: all(release.ready(pod) for pod in group), READY_SECONDS, "the group is ready again")
        wait_for(lambda: counted_by_gateways(release, 2), 20, "gateways count both groups again")
    assert scores("grouped") == pytest.approx(scores("yardstick-demo"), abs=1e-5)


def test_an_upgrade_takes_one_group_after_the_other(ingress: IngressProxy, release: Release, scores: Scores) -> None:
    with undisturbed(ingress, release, model="grouped"):
        release.upgrade({"pools": {"pair": POOL | {"maxContext": 1024}}}, wait=False)
        for rank in RANKS:
            release.rolled_out(rank)
    assert scores("grouped") == pytest.approx(scores("yardstick-demo"), abs=1e-5)
