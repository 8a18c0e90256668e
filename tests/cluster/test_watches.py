"""Gateways follow engines and API keys through a real API server. The tests write
these objects themselves, so a control plane without nodes is enough.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import (
    ApiClient,
    ApiException,
    AuthenticationV1TokenRequest,
    Configuration,
    CoreV1Api,
    DiscoveryV1Api,
    RbacAuthorizationV1Api,
)

from tests.gateway.keys import entry, write
from tests.gateway.pool.test_pool import following
from tests.helm.chart import manifests, one
from tests.processes import until, wait_until
from yardstick_llm.gateway.http.auth import KeyRing
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.discovery import Endpoint, Source
from yardstick_llm.gateway.pool.kubernetes import endpoint_slices
from yardstick_llm.gateway.process.kubernetes import Access, WatchedSecret, find_access
from yardstick_llm.gateway.settings import ServiceAddress

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]


class Api:
    """The Kubernetes API, in one namespace of it."""

    def __init__(self) -> None:
        self.client = find_access(os.environ).client
        self.core, self.slices = CoreV1Api(self.client), DiscoveryV1Api(self.client)
        self.namespace = f"yardstick-{uuid.uuid4().hex[:8]}"

    def add(self, body: dict[str, Any]) -> None:
        self.slices.create_namespaced_endpoint_slice(self.namespace, body)

    def change(self, body: dict[str, Any]) -> None:
        self.slices.patch_namespaced_endpoint_slice(body["metadata"]["name"], self.namespace, body)

    def delete(self, name: str) -> None:
        self.slices.delete_namespaced_endpoint_slice(name, self.namespace)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    api.core.create_namespace({"metadata": {"name": api.namespace}})
    try:
        yield api
    finally:
        api.core.delete_namespace(api.namespace)
        api.client.close()


def slice_of(name: str, *addresses: str, service: str = "engines", terminating: bool = False) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"terminating": terminating}} for address in addresses],
        "ports": [{"name": "http", "port": 8100, "protocol": "TCP"}],
    }


def source(api: Api, access: Callable[[], Access] = lambda: find_access(os.environ), watch_seconds: int = 60) -> Source:
    return endpoint_slices(ServiceAddress("engines", "http", api.namespace), access=access, watch_seconds=watch_seconds)


def at(*addresses: str, draining: bool = False) -> list[Endpoint]:
    return [Endpoint(f"http://{address}:8100", draining) for address in addresses]


async def test_the_endpoints_of_a_service_are_followed(api: Api) -> None:
    async with following(source(api)) as seen:
        await until(lambda: seen == [[]])
        began = time.monotonic()
        api.add(slice_of("a", "10.0.0.1"))
        api.add(slice_of("other", "10.0.0.9", service="other"))
        await until(lambda: seen[-1] == at("10.0.0.1"))
        assert time.monotonic() - began < 5
        api.add(slice_of("b", "10.0.0.2"))
        await until(lambda: seen[-1] == at("10.0.0.1", "10.0.0.2"))
        api.change(slice_of("a", "10.0.0.1", terminating=True))
        await until(lambda: seen[-1] == [*at("10.0.0.1", draining=True), *at("10.0.0.2")])
        api.delete("a")
        await until(lambda: seen[-1] == at("10.0.0.2"))


async def test_watches_end_and_go_on(api: Api) -> None:
    async with following(source(api, watch_seconds=1)) as seen:
        await until(lambda: seen == [[]])
        await asyncio.sleep(2.5)
        api.add(slice_of("a", "10.0.0.1"))
        await until(lambda: seen[-1:] == [at("10.0.0.1")])


def gateway_account(api: Api) -> Callable[[], Access]:
    """The credentials of an account with the chart's rights of gateways (`auth.watch`)."""
    rules = one(manifests({"auth": {"watch": True}}), "Role", "yardstick")["rules"]
    subject = {"kind": "ServiceAccount", "name": "gateway", "namespace": api.namespace}
    api.core.create_namespaced_service_account(api.namespace, {"metadata": {"name": "gateway"}})
    rights = RbacAuthorizationV1Api(api.client)
    rights.create_namespaced_role(api.namespace, {"metadata": {"name": "gateway"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gateway"}
    rights.create_namespaced_role_binding(api.namespace, {"metadata": {"name": "gateway"}, "subjects": [subject], "roleRef": role})
    asked = AuthenticationV1TokenRequest(spec={"audiences": [], "expirationSeconds": 3600})
    token = api.core.create_namespaced_service_account_token("gateway", api.namespace, asked).status.token
    admin = api.client.configuration

    def access() -> Access:
        settings = Configuration(host=admin.host, ssl_ca_cert=admin.ssl_ca_cert)
        settings.verify_ssl = admin.verify_ssl
        settings.api_key["BearerToken"] = f"Bearer {token}"
        return Access(ApiClient(settings), api.namespace)

    return access


async def test_an_account_that_may_read_slices_and_the_keys_and_nothing_else(api: Api) -> None:
    gateway = gateway_account(api)
    api.add(slice_of("a", "10.0.0.1"))
    async with following(source(api, gateway)) as seen:
        await until(lambda: seen == [at("10.0.0.1")])
    elsewhere = endpoint_slices(ServiceAddress("engines", "http", "kube-system"), access=gateway)
    async with following(elsewhere) as seen:
        await asyncio.sleep(1)
        assert seen == [], "403 in another namespace"
    core = CoreV1Api(gateway().client)
    for forbidden in (
        lambda: core.list_namespaced_secret(api.namespace),
        lambda: core.read_namespaced_secret("yardstick-engine-token", api.namespace),
    ):
        with pytest.raises(ApiException, match="403"):
            forbidden()


def test_a_key_is_revoked_within_about_a_second(api: Api, tmp_path: Path) -> None:
    """While the file stays as it was, because the kubelet is late."""

    def keys(*names: str) -> dict[str, str]:
        return {"keys.json": json.dumps({"keys": [entry(name) for name in names]})}

    name = "yardstick-api-keys"
    api.core.create_namespaced_secret(api.namespace, {"metadata": {"name": name}, "stringData": keys("a", "b")})
    file = write(tmp_path / "keys.json", entry("a"), entry("b"), entry("old"))
    ring = KeyRing(file, secret=WatchedSecret(name, "keys.json", gateway_account(api)))
    ring.start(Telemetry())
    try:
        wait_until(lambda: ring.find("old") is None)
        for valid, revoked in (("a", "b"), ("b", "a"), ("a", "b")):
            api.core.patch_namespaced_secret(name, api.namespace, {"stringData": keys(valid)})
            began = time.monotonic()
            wait_until(lambda revoked=revoked: ring.find(revoked) is None)
            assert time.monotonic() - began < 2, "1 s between two looks, and the time of the watch"
            assert ring.find(valid)
        api.core.delete_namespaced_secret(name, api.namespace)
        wait_until(lambda: ring.find("a") is None)
    finally:
        ring.stop()
