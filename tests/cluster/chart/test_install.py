"""Installed, used over the ingress, upgraded, rolled back, taken away."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest
from kubernetes.client import ApiClient, AuthorizationV1Api, CoreV1Api, DiscoveryV1Api
from kubernetes.client.exceptions import ApiException

from tests.cluster.chart.conftest import VALUES
from tests.cluster.chart.drills import replace_keys
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, api, wait_for
from tests.cluster.chart.readme import commands, follow
from tests.gateway.keys import entry

KINDS = [
    ("v1", "Pod"),
    ("v1", "Service"),
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("v1", "ServiceAccount"),
    ("v1", "PersistentVolumeClaim"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("apps/v1", "ReplicaSet"),
    ("batch/v1", "Job"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("networking.k8s.io/v1", "Ingress"),
    ("policy/v1", "PodDisruptionBudget"),
]
"""Kinds of objects that the chart makes, or that are made for them."""
SCORE = {"query": "Query: red running shoes\nItem: ", "items": ["crimson jogging sneakers\nRelevant:"], "labels": [" Yes", " No"]}


@pytest.fixture
def client(ingress: IngressProxy, release: Release) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{ingress.url}/v1", api_key=release.key, default_headers={"host": ingress.host}, max_retries=0)


def test_the_sdk_scores_and_generates_over_the_ingress(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["yardstick-demo"]
    answer = client.post("/score", cast_to=object, body=SCORE | {"apply_softmax": True})
    ((yes, no),) = answer["scores"]
    assert yes + no == pytest.approx(1)
    assert yes > 0.5, "a jogging sneaker answers the query"
    messages = [{"role": "user", "content": "Describe: red running shoes"}]
    whole = client.chat.completions.create(model="yardstick-demo", messages=messages, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(model="yardstick-demo", messages=messages, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_only_the_api_is_let_in(ingress: IngressProxy, release: Release):
    headers = {"host": ingress.host}
    assert httpx.get(f"{ingress.url}/metrics", headers=headers).status_code == 404
    assert httpx.get(f"{ingress.url}/v1/models").status_code == 404, "another host"
    refused = httpx.post(f"{ingress.url}/v1/score", headers=headers, json=SCORE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_engine_answers_its_gateways_only(release: Release):
    ask = "import urllib.request as r; r.urlopen('http://yardstick-engine-0.yardstick-engine:8100/info')"
    code = f"try:\n {ask}\nexcept Exception as e: print(getattr(e, 'code', e))"
    gateway = release.pods("gateway")[0]
    # on a busy node, the command or the engine's name may fail once
    wait_for(lambda: release.run_in(gateway, "python", "-c", code).strip() == "401", 60, "the engine refuses")


def test_pods_run_as_nobody_on_a_root_that_cannot_be_written(release: Release):
    gateway = release.pods("gateway")[0]
    for pod in (gateway, "yardstick-engine-0"):
        assert release.run_in(pod, "id", "-u").strip() == "10001"
        assert "Read-only" in release.run_in(pod, "touch", "/opt/x")
    assert "No module named 'torch'" in release.run_in(gateway, "python", "-c", "import torch")


def test_the_demo_engine_has_a_memory_limit_and_a_quarter_of_it_left(release: Release, client: openai.OpenAI):
    """Without the engine's limit by default, or with a limit that it nearly fills, the node's memory would be promised twice."""
    assert len(client.post("/score", cast_to=dict, body=SCORE)["scores"]) == len(SCORE["items"])
    versions = "memory.max memory.current", "memory/memory.limit_in_bytes memory/memory.usage_in_bytes"
    read = " || ".join(f"cat {files} 2>/dev/null" for files in versions)
    limit, used = map(int, release.run_in("yardstick-engine-0", "sh", "-c", f"cd /sys/fs/cgroup; {read}").split())
    assert limit == 2 << 30
    assert used < 0.75 * limit


def test_a_gateway_may_ask_for_endpoint_slices_only(release: Release):
    account = f"system:serviceaccount:{release.namespace}:yardstick"
    reviews = AuthorizationV1Api(api())

    def may(verb: str, what: str, namespace: str = release.namespace) -> bool:
        resource, _, group = what.partition(".")
        asked = {"verb": verb, "resource": resource, "group": group, "namespace": namespace}
        review = {"spec": {"user": account, "resourceAttributes": asked}}
        return bool(reviews.create_subject_access_review(review).status.allowed)

    slices = "endpointslices.discovery.k8s.io"
    assert all(may(verb, slices) for verb in ("get", "list", "watch"))
    assert not any(may(verb, slices) for verb in ("create", "update", "patch", "delete"))
    for what in (
        "pods",
        "secrets",
        "configmaps",
        "services",
        "endpoints",
        "nodes",
        "deployments.apps",
        "leases.coordination.k8s.io",
    ):
        assert not any(may(verb, what) for verb in ("get", "list", "create"))
    assert not may("list", slices, "kube-system")
    gateway = ApiClient(api().configuration, header_name="Impersonate-User", header_value=account)
    DiscoveryV1Api(gateway).list_namespaced_endpoint_slice(release.namespace)
    with pytest.raises(ApiException) as refused:
        CoreV1Api(gateway).list_namespaced_secret(release.namespace)
    assert refused.value.status == 403
    gateway.close()


def test_helm_test_passes(release: Release):
    assert "yardstick-demo: scores and generates" in release.test()


def test_upgrade_and_rollback_keep_the_secrets(release: Release, client: openai.OpenAI):
    kept = [("yardstick-first-key", "key"), ("yardstick-engine-token", "token"), ("yardstick-redis", "password")]
    before = [release.secret(*which) for which in kept]

    def variables() -> set[str]:
        (container,) = release.apps.read_namespaced_deployment("yardstick", release.namespace).spec.template.spec.containers
        return {variable.name for variable in container.env}

    release.upgrade({"gateway": {"settings": {"max_in_flight": 77}}})
    assert "YARDSTICK_MAX_IN_FLIGHT" in variables()
    assert [release.secret(*which) for which in kept] == before
    client.post("/score", cast_to=object, body=SCORE)
    release.rollback(1)
    assert "YARDSTICK_MAX_IN_FLIGHT" not in variables()
    assert [release.secret(*which) for which in kept] == before
    client.post("/score", cast_to=object, body=SCORE)


def test_a_changed_key_file_counts_at_once_and_a_bad_entry_harms_nobody(release: Release, ingress: IngressProxy):
    """With the command of docs/operations.md. Kubelets alone would take a minute or more."""

    def replace(file: str, keys: int, problems: int) -> None:
        replace_keys(release, file)

        def seen() -> bool:
            wanted = {"yardstick_api_keys": keys, "yardstick_key_file_problems": problems}
            pods = release.pods("gateway")
            return all(release.gateway_metric(pod, metric) == value for pod in pods for metric, value in wanted.items())

        wait_for(seen, 30, "every gateway has the new keys")

    def status(key: str) -> int:
        headers = {"host": ingress.host, "authorization": f"Bearer {key}"}
        return httpx.get(f"{ingress.url}/v1/models", headers=headers).status_code

    before = release.secret("yardstick-api-keys", "keys.json")
    twice = [entry("second"), entry("third"), entry("third") | {"name": "fourth", "admin": True}]
    file = json.dumps({"keys": [*json.loads(before)["keys"], *twice]})
    try:
        replace(file, keys=2, problems=1)
        assert [status(key) for key in (release.key, "second", "third")] == [200, 200, 401]
        assert all(release.ready(pod) for pod in release.pods("gateway"))
    finally:
        replace(before, keys=1, problems=0)
    assert [status(key) for key in (release.key, "second")] == [200, 401]


def test_uninstall_leaves_nothing(cluster: None):
    release = Release("yardstick-test-gone")
    release.create_namespace()
    before = release.objects(*KINDS)
    small = VALUES | {"engine": VALUES["engine"] | {"replicas": 1}, "gateway": VALUES["gateway"] | {"replicas": 1}}
    try:
        release.install(small)
        assert len(release.objects(*KINDS)) > 10
        release.uninstall()
        ignored = {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}

        def left() -> set[str]:
            return {name for name in release.objects(*KINDS) - before - ignored if "default-token" not in name}

        wait_for(lambda: not left(), 90, f"gone: {left()}")
    finally:
        release.delete_namespace()


def test_the_readme_word_for_word(cluster: None, tmp_path: Path):
    """The commands of the README's section; the images are those that were built before."""
    typed = commands("On Kubernetes")
    assert len(typed) >= 12
    try:
        done = follow([command for command in typed if not command.startswith("make images")], tmp_path)
        assert '"object":"scoring"' in done.stdout
        assert "scores and generates" in done.stdout
        assert "sending to http://yardstick for 30 s" in done.stdout, "the load's progress"
        assert json.loads((tmp_path / "in-cluster" / "summary.json").read_text())["failures"] == 0
    finally:
        Release("yardstick").delete_namespace()
