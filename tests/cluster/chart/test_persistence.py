"""The chart's Redis on disk: registered items outlive its pod."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.chart.disks import Disk, disk
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.test_catalogues import ASKED, COUNT, QUERIES, Shop

CLAIM = "yardstick-redis"


@pytest.fixture
def persistent(release: Release) -> Iterator[Disk]:
    """The release's Redis, with a claim. The tests behind this one have it without."""
    with disk(release, "redis") as kept:
        release.upgrade({"redis": {"persistence": {"enabled": True, "size": "1Gi", "storageClass": kept.name}}})
        try:
            yield kept
        finally:
            release.upgrade({"redis": {"persistence": {"enabled": False, "size": "2Gi", "storageClass": ""}}})
            release.core.delete_namespaced_persistent_volume_claim(CLAIM, release.namespace)


def test_a_catalogue_outlives_its_redis(ingress: IngressProxy, release: Release, persistent: Disk) -> None:
    wait_for(lambda: redis_in_use(release), 30, "gateways use the new Redis")
    shop = Shop(ingress, release)
    expected = shop.scores(QUERIES[0], ASKED)
    (old,) = release.pods("redis")
    release.delete_pod(old)
    wait_for(lambda: len(set(release.pods("redis")) - {old}) == 1, 60, "another Redis")
    (new,) = set(release.pods("redis")) - {old}
    wait_for(lambda: release.ready(new), 60, "it has read its file")
    wait_for(lambda: redis_in_use(release) and shop_found(shop), 60, "gateways use it")
    assert shop.client.get("/v1/catalogues/shop").raise_for_status().json()["items"] == COUNT
    assert shop.scores(QUERIES[0], ASKED) == [pytest.approx(row, abs=1e-5) for row in expected]
    shop.client.close()


def shop_found(shop: Shop) -> bool:
    """Whether every gateway answers for the catalogue, also if it is lost. A gateway that was not asked meanwhile notices only now
    that Redis was away."""
    return all(shop.client.get("/v1/catalogues/shop").status_code != 503 for _ in range(8))


def redis_in_use(release: Release) -> bool:
    return all(release.gateway_metric(pod, "yardstick_redis_available") == 1 for pod in release.pods("gateway"))
