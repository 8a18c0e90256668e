"""Additions of users to the chart's objects: routes, containers, devices, accounts, digests, monitors, objects, downloads."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from tests.helm.chart import Manifest, Values, helm, manifests, one, render


def engine(values: Values, name: str = "yardstick-engine") -> Manifest:
    return one(manifests(values), "StatefulSet", name)["spec"]["template"]["spec"]


def test_an_http_route_admits_what_the_ingress_admits_and_allows_long_streams() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "console": True}
    found = manifests({"gateway": {"httpRoute": route, "ingress": {"enabled": True, "console": True}}})
    rules = one(found, "HTTPRoute", "yardstick")["spec"]["rules"]
    paths = [match["path"] for rule in rules for match in rule["matches"]]
    (ingress,) = one(found, "Ingress", "yardstick")["spec"]["rules"]
    kinds = {"Prefix": "PathPrefix", "Exact": "Exact"}
    assert paths == [{"type": kinds[path["pathType"]], "value": path["path"]} for path in ingress["http"]["paths"]]
    assert all(len(rule["matches"]) <= 8 for rule in rules), "the most that version 1.0 of the API takes"
    assert all(rule["timeouts"] == {"request": "0s", "backendRequest": "0s"} for rule in rules)
    assert all(rule["backendRefs"] == [{"name": "yardstick", "port": 80}] for rule in rules)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"engine": {"enabled": False}}, "there is no engine"),
        ({"auth": {"generateFirstKey": False}}, "there is no API key"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "parentRefs"),
        ({"gateway": {"service": {"externalTrafficPolicy": "Local"}}}, "gateway.service.type` is ClusterIP"),
        ({"gateway": {"service": {"loadBalancerClass": "example.com/internal"}}}, "gateway.service.type` is ClusterIP"),
        ({"gateway": {"service": {"type": "NodePort", "loadBalancerClass": "a/b"}}}, "gateway.service.type` is NodePort"),
    ],
)
def test_what_cannot_work_is_refused_in_words(values: Values, words: str) -> None:
    with pytest.raises(helm().HelmError, match=words):
        render(values)


@pytest.mark.parametrize(
    ("preset", "timeout"),
    [
        ("nginx", ("nginx.ingress.kubernetes.io/proxy-read-timeout", "90")),
        ("nginx-inc", ("nginx.org/proxy-read-timeout", "90s")),
        ("haproxy", ("haproxy.org/timeout-server", "90s")),
        ("contour", ("projectcontour.io/response-timeout", "infinity")),
        ("alb", ("alb.ingress.kubernetes.io/load-balancer-attributes", "idle_timeout.timeout_seconds=90")),
        ("", None),
    ],
)
def test_an_ingress_preset_has_the_annotations_of_its_controller_only(preset: str, timeout: tuple[str, str] | None) -> None:
    own = {"example.com/own": "yes"}
    ingress = {"enabled": True, "preset": preset, "timeoutSeconds": 90, "annotations": own}
    annotations = one(manifests({"gateway": {"ingress": ingress}}), "Ingress", "yardstick")["metadata"]["annotations"]
    assert annotations.items() >= own.items()
    if timeout is None:
        assert annotations == own
    else:
        assert annotations[timeout[0]] == timeout[1]
        assert {key.partition("/")[0] for key in annotations} == {timeout[0].partition("/")[0], "example.com"}


def relabeled(values: Values, kind: str, name: str) -> list[dict[str, Any]]:
    monitor = one(manifests(values), kind, name)["spec"]
    (endpoint,) = monitor["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    return endpoint.get("relabelings", [])


def test_a_pod_monitor_gives_series_the_labels_that_alerts_use() -> None:
    own = [{"action": "drop", "sourceLabels": ["__meta_kubernetes_namespace"], "regex": "kube-system"}]
    values: Values = {
        "engine": {"model": "org/large"},
        "pools": {"small": {"model": "org/small"}},
        "monitoring": {"podMonitor": {"enabled": True, "relabelings": own}},
    }
    engines = relabeled(values, "PodMonitor", "yardstick-engine")
    assert {rule["targetLabel"] for rule in engines if "targetLabel" in rule} == {"pool", "service", "model"}
    models = {rule["regex"]: rule["replacement"] for rule in engines if rule.get("targetLabel") == "model"}
    assert models == {"yardstick-engine": "large", "yardstick-engine-small": "small"}
    gateways = relabeled(values, "PodMonitor", "yardstick-gateway")
    assert gateways == [{"replacement": "yardstick", "targetLabel": "service"}, *own]
    assert engines[-1:] == own


def test_one_job_fills_the_claim_that_pods_share() -> None:
    cache = {"existingClaim": "models", "readOnly": True, "download": "job"}
    values: Values = {"engine": {"model": "org/ranker", "revision": "abc", "modelCache": cache, "hubToken": {"secret": "hub"}}}
    found = manifests(values)
    (job,) = [manifest for manifest in found if manifest["kind"] == "Job"]
    kubernetes_validate.validate(job, "1.30", strict=True)
    (download,) = job["spec"]["template"]["spec"]["containers"]
    assert (download["command"], download["args"]) == (["python", "-m", "yardstick_llm.engine.models.download"], ["org/ranker@abc"])
    assert "HF_TOKEN" in {variable["name"] for variable in download["env"]}
    assert not next(mount for mount in download["volumeMounts"] if mount["name"] == "models").get("readOnly")
    pod = engine(values)
    (waits,) = pod["initContainers"]
    assert waits["args"] == ["--wait=1800", "org/ranker@abc"]
    for container in (waits, pod["containers"][0]):
        assert "HF_TOKEN" not in {variable["name"] for variable in container["env"]}
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]
    service = one(found, "Service", "yardstick-engine")["spec"]["selector"]
    assert not service.items() <= job["spec"]["template"]["metadata"]["labels"].items(), "the Job's pod is no engine"
    other = manifests({"engine": values["engine"] | {"revision": "def"}})
    names = {manifest["metadata"]["name"] for manifest in [*found, *other] if manifest["kind"] == "Job"}
    assert len(names) == 2, "a Job cannot be changed, so another revision is another Job"


@pytest.mark.parametrize("download", ["init", "job"])
def test_adapters_of_a_hub_are_downloaded_with_the_model(download: str) -> None:
    """Engines are offline then, so an adapter that is not downloaded before would end them at their start."""
    cache = {"download": download, "existingClaim": "models"}
    lora = {"adapters": {"sql": "org/sql-lora@v1", "support": "/adapters/support"}, "existingClaim": "tuned"}
    found = manifests({"engine": {"model": "org/ranker", "modelCache": cache, "lora": lora}})
    pod = one(found, "StatefulSet", "yardstick-engine")["spec"]["template"]["spec"]
    waits = ["--wait=1800"] if download == "job" else []
    assert pod["initContainers"][0]["args"] == [*waits, "org/ranker", "--lora=sql=org/sql-lora@v1"]
    assert "--lora=sql=org/sql-lora@v1" in pod["containers"][0]["args"]
    jobs = [m["spec"]["template"]["spec"]["containers"][0]["args"] for m in found if m["kind"] == "Job"]
    assert jobs == ([["org/ranker", "--lora=sql=org/sql-lora@v1"]] if download == "job" else [])
    alone = engine({"engine": {"modelCache": {"download": "init"}, "lora": {"adapters": {"sql": "org/sql-lora"}}}})
    assert alone["initContainers"][0]["args"] == ["--lora=sql=org/sql-lora"], "the demo model is in the image"
