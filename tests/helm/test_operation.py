"""Autoscaling, alerts and network policies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import Manifest, Values, helm, manifests, one, render
from yardstick_llm.gateway.settings import load_settings
from yardstick_llm.tracing.sampling import Sampler, sampler_of

ZERO: Values = {"engine": {"model": "org/ranker-2.0", "autoscaling": {"enabled": True, "minReplicas": 0}}}
MONITORED: Values = {"monitoring": {"rules": {"enabled": True}, "serviceMonitor": {"enabled": True}}}


def scaled(values: Values, replicas: int = 1, **autoscaling: Any) -> list[Manifest]:
    return manifests(values | {"engine": {"replicas": replicas, "autoscaling": {"enabled": True} | autoscaling}})


def query_of(found: list[Manifest]) -> str:
    (trigger,) = one(found, "ScaledObject", "yardstick-engine")["spec"]["triggers"]
    return trigger["metadata"]["query"]


def test_pods_that_compute_count_as_much_as_pods_that_queue():
    query = query_of(scaled({}))
    for what in ("yardstick_engine_requests_running", "yardstick_engine_requests_waiting"):
        assert f'(sum({what}{{namespace="apps",service="yardstick-engine"}}))' in query
    hpa = one(scaled({}, kind="hpa"), "HorizontalPodAutoscaler", "yardstick-engine")
    names = [metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]]
    assert names == ["yardstick_engine_requests"], "of several, an HPA takes the largest, not the sum"


def test_an_autoscaler_has_the_number_of_pods_to_itself():
    """tests/cluster/test_chart_upgrades.py has what happens to objects that have a number already."""
    found = scaled({"gateway": {"replicas": 4, "autoscaling": {"enabled": True}}}, replicas=5)
    for manifest in (one(found, "StatefulSet", "yardstick-engine"), one(found, "Deployment", "yardstick")):
        assert "replicas" not in manifest["spec"]
        assert manifest["metadata"]["annotations"]["yardstick/autoscaled"] == "true"
    fixed = one(manifests({"engine": {"replicas": 5}}), "StatefulSet", "yardstick-engine")
    assert (fixed["spec"]["replicas"], fixed["metadata"]["annotations"]) == (5, {"yardstick/replicas": "5"})


def test_keda_takes_what_the_values_add():
    advanced = {"restoreToOriginalReplicaCount": True, "horizontalPodAutoscalerConfig": {"name": "mine"}}
    cron = {"type": "cron", "metadata": {"timezone": "UTC", "start": "0 8 * * *", "end": "0 18 * * *", "desiredReplicas": "3"}}
    keda = {"authenticationRef": {"name": "prometheus"}, "authModes": "bearer", "extraTriggers": [cron], "advanced": advanced}
    fallback = {"failureThreshold": 3, "replicas": 4}
    spec = one(scaled({}, fallback=fallback, **keda), "ScaledObject", "yardstick-engine")["spec"]
    trigger, other = spec["triggers"]
    assert (trigger["authenticationRef"], trigger["metadata"]["authModes"], other) == ({"name": "prometheus"}, "bearer", cron)
    assert spec["fallback"] == fallback
    assert spec["advanced"]["restoreToOriginalReplicaCount"] is True
    config = spec["advanced"]["horizontalPodAutoscalerConfig"]
    assert (config["name"], config["behavior"]["scaleDown"]["stabilizationWindowSeconds"]) == ("mine", 600)
    assert trigger["metadata"]["ignoreNullValues"] == "false", "KEDA takes an empty answer for 0 otherwise"


def test_a_pool_may_be_scaled_to_zero():
    """Woken by requests that wait in gateways, and by gateways that do not know the model yet."""
    found = manifests(ZERO | MONITORED)
    assert one(found, "ScaledObject", "yardstick-engine")["spec"]["minReplicaCount"] == 0
    gateways = 'namespace="apps",service="yardstick"'
    query = query_of(found)
    assert f'max_over_time(yardstick_model_requests_waiting{{{gateways},model="ranker-2.0"}}[1m])' in query
    assert f"(count(yardstick_engines_ready{{{gateways}}}) or vector(0))" in query
    assert f'(count(yardstick_model_engines_ready{{{gateways},model="ranker-2.0"}}) or vector(0))' in query
    assert r'model!~"ranker-2\\.0"' in expression(found, "YardstickNoEngine"), "it is no alarm that it has none"
    with pytest.raises(helm().HelmError, match="an HPA does not scale to zero"):
        render({"engine": {"autoscaling": {"enabled": True, "minReplicas": 0, "kind": "hpa"}}})


def expression(found: list[Manifest], alert: str) -> str:
    rules = one(found, "PrometheusRule", "yardstick")["spec"]["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == alert]
    return rule["expr"]


def test_series_of_engines_have_pool_and_model():
    found = manifests(MONITORED | {"pools": {"b": {"model": "org/b"}}})
    (endpoint,) = one(found, "ServiceMonitor", "yardstick-engine")["spec"]["endpoints"]
    targets = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
    assert targets == {
        "pool": ["__meta_kubernetes_service_label_yardstick_pool"],
        "model": ["__meta_kubernetes_service_annotation_yardstick_model"],
    }
    services = [one(found, "Service", name)["metadata"] for name in ("yardstick-engine", "yardstick-engine-b")]
    assert [service["labels"]["yardstick/pool"] for service in services] == ["default", "b"]
    assert [service["annotations"]["yardstick/model"] for service in services] == ["yardstick-demo", "b"]


def test_without_a_page_alerts_have_no_links():
    rules = one(manifests(MONITORED), "PrometheusRule", "yardstick")["spec"]["groups"][0]["rules"]
    assert all("runbook_url" not in rule["annotations"] for rule in rules)
    with pytest.raises(helm().HelmValuesError):
        render({"monitoring": {"rules": {"enabled": True, "runbookURL": "docs/operations.md"}}})


def egress(values: Values, policy: str = "yardstick") -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = one(manifests(values), "NetworkPolicy", policy)["spec"]["egress"]
    return rules


def to(port: int | None, *, address: str = "", namespace: str = "") -> dict[str, Any]:
    """A rule that lets connections through to a port of an address or of a namespace, or of all."""
    rule: dict[str, Any] = {} if port is None else {"ports": [{"port": port, "protocol": "TCP"}]}
    if address:
        rule["to"] = [{"ipBlock": {"cidr": address}}]
    if namespace:
        rule["to"] = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]
    return rule


@pytest.mark.parametrize(
    ("part", "url", "rule"),
    [
        ("redis", "redis://10.0.0.7:6380/0", to(6380, address="10.0.0.7/32")),
        ("redis", "rediss://me@[fd00::7]", to(6379, address="fd00::7/128")),
        ("redis", "redis://cache.example.com:7000", to(7000)),
        ("redis", "redis+cluster://10.0.0.7:7001", to(7001)),
        ("engine", "http://10.0.0.1:8100", to(8100, address="10.0.0.1/32")),
        ("engine", "https://engines.example.com/", to(443)),
        ("engine", "http://engines.example.com", to(80)),
        ("engine", "dns://engines.models.svc:8200", to(8200)),
        ("engine", "kubernetes://models/engines:8100", to(8100, namespace="models")),
        ("engine", "kubernetes://engines:wire", to(None, namespace="apps")),
    ],
)
def test_gateways_may_connect_to_another_redis_and_other_engines(part: str, url: str, rule: dict[str, Any]):
    assert rule in egress({"redis": {"url": url}} if part == "redis" else {"gateway": {"engines": [url]}})


TRACING: Values = {"tracing": {"endpoint": "http://10.0.0.9:4318", "ratio": 0.1, "headersSecret": "collector"}}


def test_gateways_and_engines_send_traces():
    found = manifests(TRACING)
    gateway = one(found, "Deployment", "yardstick")["spec"]["template"]["spec"]["containers"][0]
    engine = one(found, "StatefulSet", "yardstick-engine")["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in gateway["env"]}
    settings = load_settings({name: value for name, value in variables.items() if "TRACING" in name}, {"engines": ["http://a"]})
    assert settings.tracing_endpoint == "http://10.0.0.9:4318"
    assert sampler_of(variables) == Sampler(0.1)
    assert "--tracing-endpoint=http://10.0.0.9:4318" in engine["args"]
    headers = {"secretKeyRef": {"name": "collector", "key": "headers"}}
    for container in (gateway, engine):
        assert {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": headers} in container["env"]


@pytest.mark.parametrize("policy", ["yardstick", "yardstick-engine"])
def test_gateways_and_engines_may_connect_to_the_collector(policy: str):
    rule = to(4318, address="10.0.0.9/32")
    assert rule in egress(TRACING, policy)
    assert rule not in egress(TRACING, "yardstick-test")
    assert to(4318) in egress({"tracing": {"endpoint": "http://collector:4318"}}, policy)
