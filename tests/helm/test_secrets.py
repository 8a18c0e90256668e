"""Secrets: generated once, or existing ones; and keys that are given twice."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.helm.chart import EVERYTHING, GITOPS, Values, helm, manifests, one, render
from tests.parts import need
from tests.processes import free_port, wait_until


def test_without_a_view_of_the_cluster_nothing_is_random():
    """Argo CD renders the chart again and again, and applies what differs."""
    first, second = render(GITOPS), render(GITOPS)
    assert first == second
    found = manifests(GITOPS)
    assert "Secret" not in {m["kind"] for m in found}
    assert "replicas" not in one(found, "StatefulSet", "yardstick-engine")["spec"]
    assert "replicas" not in one(found, "Deployment", "yardstick")["spec"]


@pytest.mark.parametrize("missing", ["auth", "engineToken", "redis"])
def test_without_a_view_of_the_cluster_no_secret_is_generated(missing: str):
    with pytest.raises(helm().HelmError, match="with `gitops` the chart generates no Secret"):
        render({key: value for key, value in GITOPS.items() if key != missing})
    keys = {"auth": {"generateFirstKey": False, "keys": [{"name": "ci", "sha256": "ab" * 32}]}}
    assert render(GITOPS | keys) == render(GITOPS | keys), "hashes of keys are not random"


def test_a_new_password_restarts_the_bundled_redis():
    found = manifests({})
    password = base64.b64decode(one(found, "Secret", "yardstick-redis")["data"]["password"])
    annotations = one(found, "Deployment", "yardstick-redis")["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"checksum/password": hashlib.sha256(password).hexdigest()}


@contextmanager
def running_redis(values: Values, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The container's own command, with ``folder`` for its volumes; killed at the end."""
    (container,) = one(manifests(values), "Deployment", "yardstick-redis")["spec"]["template"]["spec"]["containers"]
    command = [part.replace("/tmp/", f"{folder}/").replace("/etc/redis", str(folder)) for part in container["command"]]
    arguments = [str(folder) if part in ("/tmp", "/data") else part for part in container["args"]]
    need("redis")
    with subprocess.Popen([*command, *arguments, "--port", str(port)], stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_persistent_redis_has_its_keys_after_it_was_killed(persistent: bool, tmp_path: Path):
    (tmp_path / "password").write_text("secret")
    values, port = {"redis": {"persistence": {"enabled": persistent}}}, free_port()
    for found in (None, b"items" if persistent else None):
        with running_redis(values, tmp_path, port), client_of(port, "secret") as client:
            wait_until(lambda: answers(client))
            assert client.get("catalogue") == found
            client.set("catalogue", "items")


def test_only_a_persistent_redis_of_the_release_has_a_claim():
    """The claim itself: tests/helm/golden/gitops.yaml."""
    for values in (
        {"persistence": {"enabled": True, "existingClaim": "mine"}},
        {"persistence": {"enabled": False}},
        {"url": "redis://cache:6379", "persistence": {"enabled": True}},
    ):
        assert "PersistentVolumeClaim" not in {manifest["kind"] for manifest in manifests({"redis": values})}
    found = manifests({"redis": {"persistence": {"enabled": True, "existingClaim": "mine"}}})
    pod = one(found, "Deployment", "yardstick-redis")["spec"]["template"]["spec"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}} in pod["volumes"]


@pytest.mark.slow
def test_redis_starts_with_the_password_of_the_file(tmp_path: Path):
    password = 'with "quotes", \\ and spaces'
    (tmp_path / "password").write_text(f"{password}\n")
    port = free_port()
    with running_redis({}, tmp_path, port) as process:
        with client_of(port, password) as client:
            wait_until(lambda: answers(client))
        with client_of(port) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert oct((tmp_path / "redis.conf").stat().st_mode)[-3:] == "600"


def client_of(port: int, password: str | None = None) -> redis.Redis:
    return redis.Redis(port=port, password=password, retry=Retry(NoBackoff(), 0))


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class Strict(yaml.SafeLoader):
    """Refuses a key that is given twice, as Kubernetes's strict decoding and Flux do; PyYAML takes the last one."""


def _mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(set(keys)) == len(keys), f"{node.start_mark}: {sorted(keys)}"
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)

CLASHING: Values = {
    "commonLabels": {"team": "search", "app.kubernetes.io/name": "mine", "app.kubernetes.io/part-of": "shop", "cost": "all"},
    "engine": {"podLabels": {"cost": "engine", "app.kubernetes.io/component": "mine"}},
    "gateway": {
        "podLabels": {"cost": "gateway", "team": "edge"},
        "ingress": {"enabled": True, "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "5"}},
    },
    "redis": {"podAnnotations": {"checksum/password": "mine"}},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"team": "metrics"}},
        "rules": {"enabled": True, "labels": {"team": "metrics"}},
        "dashboards": {"enabled": True, "labels": {"team": "metrics"}},
    },
}


@pytest.mark.parametrize("values", [CLASHING, EVERYTHING], ids=["clashing", "everything"])
def test_no_key_is_given_twice(values: Values):
    for path, text in render(values).items():
        if path.endswith(".yaml"):
            list(yaml.load_all(text, Loader=Strict))


def test_own_labels_win_over_common_ones_and_never_over_selectors():
    found = manifests(CLASHING)
    engine = one(found, "StatefulSet", "yardstick-engine")["spec"]
    assert engine["template"]["metadata"]["labels"].items() >= engine["selector"]["matchLabels"].items()
    assert engine["template"]["metadata"]["labels"]["cost"] == "engine"
    assert one(found, "Deployment", "yardstick")["spec"]["template"]["metadata"]["labels"]["team"] == "edge"
    assert one(found, "ServiceMonitor", "yardstick-engine")["metadata"]["labels"]["team"] == "metrics"
    timeout = one(found, "Ingress", "yardstick")["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]
    assert timeout == "5"
