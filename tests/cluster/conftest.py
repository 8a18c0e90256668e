"""Tests against the cluster that ``KUBECONFIG`` names. Each gets a namespace of its own, which is deleted after it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.pool.discovery.access import find_access


class Api:
    """The Kubernetes API, in one namespace of it."""

    def __init__(self) -> None:
        access = find_access(os.environ)
        self.client = httpx.Client(base_url=access.server, headers=access.headers, verify=access.tls, timeout=20)
        self.namespace = f"yardstick-{uuid.uuid4().hex[:8]}"

    def send(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> httpx.Response:
        """Raises for what is no success."""
        return self.client.request(method, path, json=body, headers={"content-type": kind}).raise_for_status()

    def path(self, resource: str, group: str = "api/v1") -> str:
        return f"/{group}/namespaces/{self.namespace}/{resource}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They are skipped where no cluster is named."""
    if os.environ.get("KUBECONFIG"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="KUBECONFIG names no cluster"))


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    api.send("POST", "/api/v1/namespaces", {"metadata": {"name": api.namespace}})
    try:
        yield api
    finally:
        api.send("DELETE", f"/api/v1/namespaces/{api.namespace}")
        api.client.close()
