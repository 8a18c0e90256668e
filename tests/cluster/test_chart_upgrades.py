"""Upgrades of the chart against a real apiserver, without pods: what the chart reads, and what Kubernetes lets it change."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster.chart.kube import HelmError, Release, wait_for
from tests.helm.chart import Values

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]
ENGINE = "yardstick-engine"


class Cluster:
    """A release without pods that run, and the API."""

    def __init__(self) -> None:
        self.release = Release(f"yardstick-chart-{uuid.uuid4().hex[:6]}")
        self.core, self.apps, self.namespace = self.release.core, self.release.apps, self.release.namespace

    def install(self, values: Values) -> None:
        self.release.install(values, wait=False)

    def upgrade(self, values: Values) -> None:
        self.release.upgrade(values, wait=False)

    def secret(self, name: str) -> dict[str, str]:
        data: dict[str, str] = self.core.read_namespaced_secret(name, self.namespace).data
        return data

    def annotations(self, deployment: str) -> dict[str, str]:
        template = self.apps.read_namespaced_deployment(deployment, self.namespace).spec.template
        return dict(template.metadata.annotations or {})

    def replicas(self) -> int:
        return int(self.apps.read_namespaced_stateful_set(ENGINE, self.namespace).spec.replicas)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.release.delete_namespace()


def test_a_changed_password_of_an_existing_secret_restarts_redis(cluster: Cluster) -> None:
    cluster.core.create_namespace({"metadata": {"name": cluster.namespace}})
    cluster.core.create_namespaced_secret(cluster.namespace, {"metadata": {"name": "cache"}, "stringData": {"password": "one"}})
    cluster.install({"redis": {"existingSecret": "cache"}})
    before = cluster.annotations("yardstick-redis")
    cluster.upgrade({})
    assert cluster.annotations("yardstick-redis") == before != {}
    cluster.core.patch_namespaced_secret("cache", cluster.namespace, {"stringData": {"password": "two"}})
    cluster.upgrade({})
    assert cluster.annotations("yardstick-redis") != before


def test_two_releases_whose_names_collide_are_told_apart(cluster: Cluster) -> None:
    """The engines' Service of one would have the name of the gateways' Service of the other."""
    cluster.install({})
    other = Release(cluster.namespace, ENGINE)
    with pytest.raises(HelmError, match="the Service yardstick-engine of this namespace belongs to the release yardstick;"):
        other.install({}, wait=False)
    with pytest.raises(HelmError, match="two keys are named first"):
        cluster.upgrade({"auth": {"keys": [{"name": "first", "sha256": "ab" * 32}]}})


HPA: Values = {"engine": {"autoscaling": {"enabled": True, "kind": "hpa", "maxReplicas": 8}}}


def test_only_a_changed_value_changes_the_number_of_pods(cluster: Cluster) -> None:
    """Neither an upgrade for another reason after `kubectl scale`, nor one that turns autoscaling on or off."""
    cluster.install({"engine": {"replicas": 3}})
    cluster.release.scale(ENGINE, 5)
    cluster.upgrade({"gateway": {"podLabels": {"cost": "search"}}})
    assert cluster.replicas() == 5
    cluster.upgrade(HPA)
    cluster.release.scale(ENGINE, 4)
    cluster.upgrade({"engine": {"autoscaling": {"enabled": False}}})
    assert cluster.replicas() == 4
    cluster.upgrade({"engine": {"replicas": 2}})
    assert cluster.replicas() == 2


def test_neither_upgrade_nor_rollback_changes_the_number_of_an_autoscaler(cluster: Cluster) -> None:
    cluster.install(HPA)
    assert cluster.replicas() == 1
    cluster.release.scale(ENGINE, 3)
    cluster.upgrade({"gateway": {"replicas": 3}})
    assert cluster.replicas() == 3
    cluster.release.run_helm("rollback", "1")
    assert cluster.replicas() == 3
    cluster.upgrade({"engine": {"autoscaling": {"enabled": False}}})
    assert cluster.replicas() == 3


def test_a_claim_for_each_pod_can_be_added_later(cluster: Cluster) -> None:
    """With the commands of docs/operations.md: Kubernetes changes no claims of a StatefulSet that exists."""
    cluster.install({})
    with pytest.raises(HelmError, match=r"[Ff]orbidden"):
        cluster.upgrade({"engine": {"modelCache": {"persistent": True}}})
    old = cluster.core.list_namespaced_pod(cluster.namespace, label_selector="app.kubernetes.io/component=engine").items
    cluster.apps.delete_namespaced_stateful_set(ENGINE, cluster.namespace, propagation_policy="Orphan")
    wait_for(lambda: not cluster.release.objects(("apps/v1", "StatefulSet")), 60, "the StatefulSet is gone")
    cluster.upgrade({"engine": {"modelCache": {"persistent": True, "size": "7Gi"}}})
    found = cluster.apps.read_namespaced_stateful_set(ENGINE, cluster.namespace).spec.volume_claim_templates
    assert [claim.spec.resources.requests for claim in found] == [{"storage": "7Gi"}]
    for pod in old:
        cluster.core.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=0)
    wait_for(lambda: cluster.core.list_namespaced_persistent_volume_claim(cluster.namespace).items, 60, "a claim for the new pod")
