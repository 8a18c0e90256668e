"""Discovery against a real apiserver. It writes the slices itself, so a control plane without nodes is enough."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway.pool.discovery.access import Access, find_access
from gateway.pool.discovery.address import ServiceAddress
from gateway.pool.discovery.base import Endpoint
from gateway.pool.discovery.kubernetes import EndpointSlices
from tests.gateway.pool.test_discovery import following
from tests.processes import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]

GROUP = "apis/discovery.k8s.io/v1"
MERGE = "application/merge-patch+json"


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


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    api.send("POST", "/api/v1/namespaces", {"metadata": {"name": api.namespace}})
    try:
        yield api
    finally:
        api.send("DELETE", f"/api/v1/namespaces/{api.namespace}")
        api.client.close()


def slice_of(name: str, *addresses: str, service: str = "engines", terminating: bool = False) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"terminating": terminating}} for address in addresses],
        "ports": [{"name": "http", "port": 8100, "protocol": "TCP"}],
    }


def source(api: Api, access: Any = None, watch_seconds: int = 60) -> EndpointSlices:
    address = ServiceAddress("engines", "http", api.namespace)
    return EndpointSlices(address, access=access or (lambda: find_access(os.environ)), watch_seconds=watch_seconds)


def at(*addresses: str, draining: bool = False) -> list[Endpoint]:
    return [Endpoint(f"http://{address}:8100", draining) for address in addresses]


async def test_the_endpoints_of_a_service_are_followed(api: Api) -> None:
    slices = api.path("endpointslices", GROUP)
    async with following(source(api)) as seen:
        await until(lambda: seen == [[]])
        began = time.monotonic()
        api.send("POST", slices, slice_of("a", "10.0.0.1"))
        api.send("POST", slices, slice_of("other", "10.0.0.9", service="other"))
        await until(lambda: seen[-1] == at("10.0.0.1"))
        assert time.monotonic() - began < 5
        api.send("POST", slices, slice_of("b", "10.0.0.2"))
        await until(lambda: seen[-1] == at("10.0.0.1", "10.0.0.2"))
        api.send("PATCH", f"{slices}/a", slice_of("a", "10.0.0.1", terminating=True), kind=MERGE)
        await until(lambda: seen[-1] == [*at("10.0.0.1", draining=True), *at("10.0.0.2")])
        api.send("DELETE", f"{slices}/a")
        await until(lambda: seen[-1] == at("10.0.0.2"))


async def test_watches_end_and_go_on(api: Api) -> None:
    slices = api.path("endpointslices", GROUP)
    begun = 0

    def access() -> Access:
        nonlocal begun
        begun += 1
        return find_access(os.environ)

    async with following(source(api, access, watch_seconds=1)) as seen:
        await until(lambda: begun >= 3)
        api.send("POST", slices, slice_of("a", "10.0.0.1"))
        await until(lambda: seen[-1:] == [at("10.0.0.1")])


async def test_an_account_that_may_read_slices_and_nothing_else(api: Api) -> None:
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": "gateway", "namespace": api.namespace}
    api.send("POST", api.path("serviceaccounts"), {"metadata": {"name": "gateway"}})
    group = "apis/rbac.authorization.k8s.io/v1"
    api.send("POST", api.path("roles", group), {"metadata": {"name": "gateway"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gateway"}
    api.send("POST", api.path("rolebindings", group), {"metadata": {"name": "gateway"}, "subjects": [subject], "roleRef": role})
    asked = api.send("POST", api.path("serviceaccounts/gateway/token"), {"spec": {"expirationSeconds": 3600}})
    admin = find_access(os.environ)
    bare = find_access(os.environ).tls.__class__(admin.tls.protocol)  # no client certificate
    bare.check_hostname, bare.verify_mode = False, 0
    token = {"authorization": f"Bearer {asked.json()['status']['token']}"}
    gateway = msgspec.structs.replace(admin, headers=token, tls=bare)
    api.send("POST", api.path("endpointslices", GROUP), slice_of("a", "10.0.0.1"))
    async with following(source(api, lambda: gateway)) as seen:
        await until(lambda: seen == [at("10.0.0.1")])
    elsewhere = EndpointSlices(ServiceAddress("engines", "http", "kube-system"), access=lambda: gateway)
    async with following(elsewhere) as seen:
        await asyncio.sleep(1)
        assert seen == [], "403 in another namespace"
