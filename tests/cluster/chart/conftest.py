"""A release for the tests to share, on the cluster that KUBECONFIG names; `make test-cluster` runs them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.chart.apiserver import ApiServer
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, api

VALUES = {
    "engine": {
        "replicas": 2,
        "maxTotalTokens": 16384,
        "drainSeconds": 2,
        "graceSeconds": 20,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
    },
    "gateway": {
        "drainSeconds": 4,
        "graceSeconds": 20,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "ingress": {"enabled": True, "host": "yardstick.example.com"},
    },
}
"""Two engines of the demo model, on as little as a small machine has."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{Path(__file__).parent}/"):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> None:
    """A cluster that answers; the tests fail without one, rather than pass for nothing."""
    assert os.environ.get("KUBECONFIG"), "set KUBECONFIG to a cluster's, or run tests/cluster/local.sh, which starts one"
    client.VersionApi(api()).get_code(_request_timeout=30)


@pytest.fixture(scope="session")
def release(cluster: None) -> Iterator[Release]:
    """Installed and ready."""
    release = Release(f"yardstick-test-{uuid.uuid4().hex[:6]}")
    try:
        release.install(VALUES)
        yield release
    finally:
        release.delete_namespace()


@pytest.fixture(scope="session")
def ingress(release: Release) -> Iterator[IngressProxy]:
    with IngressProxy(release) as proxy:
        yield proxy


@pytest.fixture
def apiserver() -> ApiServer:
    try:
        return ApiServer()
    except FileNotFoundError:
        pytest.skip("the apiserver of this cluster is not a process that can be killed from here")
