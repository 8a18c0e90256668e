"""The chart, rendered as Helm renders it, and the sets of values that the tests look at."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
GOLDEN = Path(__file__).parent / "golden"

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of libyaml, which takes a tenth of the time, where PyYAML was built with it."""

Values = dict[str, Any]
Manifest = dict[str, Any]

LORA: Values = {
    "engine": {
        "model": "Qwen/Qwen3-8B",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "lora": {
            "existingClaim": "adapters",
            "adapters": {"sql": "org/sql-lora", "support": "/adapters/support"},
            "root": "/adapters",
            "maxLoras": 32,
            "maxLorasDevice": 16,
            "maxLoraRank": 32,
        },
    }
}
GROUPS: Values = {
    "engine": {
        "model": "org/large",
        "replicas": 2,
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "tensorParallel": 16,
        "groupSize": 2,
        "modelCache": {"existingClaim": "models"},
    },
    "pools": {"lws": {"groupKind": "LeaderWorkerSet", "groupSize": 4, "tensorParallel": 32, "autoscaling": {"enabled": True}}},
}
EVERYTHING: Values = {
    "commonLabels": {"team": "search"},
    "image": {"registry": "registry.example.com/yardstick", "tag": "0.2.0-7", "pullPolicy": "Always", "pullSecrets": ["registry"]},
    "engine": {
        "model": "org/ranker",
        "lenvmModel": "org/ranker-lengths",
        "servedName": "ranker",
        "replicas": 3,
        "device": "cuda",
        "dtype": "bfloat16",
        "quantize": "fp8",
        "revision": "0123abc",
        "lenvmRevision": "v1",
        "updateStrategy": {"partition": 1, "maxUnavailable": 2},
        "tensorParallel": 2,
        "expertParallel": 2,
        "maxTotalTokens": 500_000,
        "maxBatchedTokens": 8192,
        "maxContext": 16384,
        "extraArgs": ["--max-running-requests=64"],
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "modelCache": {"persistent": True, "size": "200Gi", "storageClass": "fast"},
        "hubToken": {"secret": "hub"},
        "sharedMemory": "2Gi",
        "resources": {"requests": {"cpu": 4, "memory": "32Gi"}, "limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}},
        "autoscaling": {
            "enabled": True,
            "maxReplicas": 8,
            "fallback": {"failureThreshold": 3, "replicas": 4},
            "authenticationRef": {"name": "prometheus", "kind": "ClusterTriggerAuthentication"},
            "authModes": "bearer",
            "extraTriggers": [{"type": "cpu", "metricType": "Utilization", "metadata": {"value": "80"}}],
            "advanced": {"restoreToOriginalReplicaCount": True},
        },
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"cost": "search"},
        "digest": f"sha256:{'0a' * 32}",
        "initContainers": [{"name": "prepare", "image": "busybox:1.37"}],
        "extraContainers": [{"name": "sidecar", "image": "busybox:1.37"}],
        "serviceAccount": {"create": True, "annotations": {"iam.example.com/role": "models"}},
    },
    "pools": {
        "small": {
            "model": "org/small",
            "lenvmModel": "",
            "servedName": "",
            "replicas": 1,
            "autoscaling": {"enabled": True, "kind": "hpa"},
        },
        "away": {"enabled": False},
    },
    "gateway": {
        "presets": {"my-reranker": "qwen3-reranker", "other": "none"},
        "aliases": {"gpt-4o-mini": "demo"},
        "fallbacks": {"large": "demo"},
        "imageHosts": ["images.example.com", "images.example.org:8443"],
        "settings": {"max_in_flight": 2048, "usage_keys": 50},
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "autoscaling": {"enabled": True},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "yardstick.example.com",
            "tlsSecret": "certificate",
            "console": True,
        },
        "affinity": {"podAntiAffinity": {}},
        "digest": f"sha256:{'0b' * 32}",
        "initContainers": [{"name": "prepare", "image": "busybox:1.37"}],
        "extraContainers": [{"name": "sidecar", "image": "busybox:1.37"}],
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
            "hostnames": ["yardstick.example.com"],
            "console": True,
        },
    },
    "auth": {"keys": [{"name": "ci", "sha256": "ab" * 32}], "watch": True},
    "tracing": {"endpoint": "http://collector.observability:4318", "ratio": 0.1, "headersSecret": "collector"},
    "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]},
    "loadTest": {"enabled": True, "workers": 4, "results": {"existingClaim": "results"}},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {
            "enabled": True,
            "runbookURL": "https://docs.example.com/operations",
            "extraLabels": {"team": "search"},
            "objectives": {"ranker": {"availability": 0.999, "latency": 0.99, "seconds": 2.5}},
        },
        "dashboards": {"enabled": True},
    },
}
EXTERNAL: Values = {
    "engine": {"enabled": False},
    "gateway": {"engines": ["http://10.0.0.1:8100", "dns://engines.example.com:8100"]},
    "auth": {"existingSecret": "keys"},
    "engineToken": {"existingSecret": "token"},
    "redis": {"url": "rediss://cache.example.com:6379", "existingSecret": "cache", "existingSecretKey": "secret"},
    "networkPolicy": {"enabled": False},
    "test": {"keySecret": "test-key"},
}
GITOPS: Values = {
    "gitops": True,
    "engine": {
        "autoscaling": {"enabled": True, "minReplicas": 0},
        "model": "org/ranker",
        "modelCache": {"existingClaim": "models", "readOnly": True, "download": "job"},
    },
    "gateway": {"autoscaling": {"enabled": True}, "settings": {"wait_seconds": 300}},
    "auth": {"existingSecret": "keys"},
    "engineToken": {"existingSecret": "token"},
    "redis": {"existingSecret": "cache", "existingSecretKey": "secret", "persistence": {"enabled": True, "storageClass": "fast"}},
    "monitoring": {"podMonitor": {"enabled": True, "metricRelabelings": [{"action": "labeldrop", "regex": "endpoint"}]}},
}
BARE: Values = {
    "redis": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "engine": {"podDisruptionBudget": {"enabled": False}, "spread": False, "modelCache": {"existingClaim": "models"}},
    "gateway": {"podDisruptionBudget": {"enabled": False}, "spread": False, "discovery": "dns"},
    "auth": {"generateFirstKey": False, "keys": [{"name": "ci", "sha256": "ab" * 32}]},
}
SETS: dict[str, Values] = {
    "default": {},
    "everything": EVERYTHING,
    "lora": LORA,
    "external": EXTERNAL,
    "bare": BARE,
    "gitops": GITOPS,
    "groups": GROUPS,
}


@cache
def helm() -> ModuleType:
    """The module ``helm_python``, imported at its first use, because it starts threads, which a forked worker would lack."""
    return importlib.import_module("helm_python")


@cache
def _chart() -> Any:
    return helm().Chart.load(CHART)


def render(values: Values, version: str = "v1.30.0", name: str = "yardstick") -> dict[str, str]:
    """Template to text. Raises HelmValuesError where the schema refuses ``values``, HelmRenderError where a template does."""
    found = _chart().render({"kubeVersionOverride": version} | values, name=name, namespace="apps", is_install=True)
    return {path.partition("templates/")[2]: text for path, text in found.items()}


def manifests(values: Values, version: str = "v1.30.0", name: str = "yardstick") -> list[Manifest]:
    """Every object of the release, without the notes. The same for the same values, so no test may change them."""
    return _manifests(json.dumps(values), version, name)


@cache
def _manifests(values: str, version: str, name: str) -> list[Manifest]:
    rendered = render(json.loads(values), version, name)
    texts = [rendered[path] for path in sorted(rendered) if path.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.load_all(text, Loader=LOADER) if manifest]


def one(found: list[Manifest], kind: str, name: str) -> Manifest:
    (manifest,) = [m for m in found if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return manifest


def golden(values: Values) -> str:
    """A release as text. Templates that render what they do by default are only named."""
    usual = lasting({}) if values else {}
    return "".join(
        f"# {path}: as in default.yaml\n" if usual.get(path) == text else f"# {path}\n{text}\n"
        for path, text in sorted(lasting(values).items())
        if text
    )


def lasting(values: Values) -> dict[str, str]:
    """Template to text that is the same every time: what is drawn at random is replaced. A whole dashboard is only named."""
    dashboards = {path.name: indent(path.read_text().strip(), "    ") for path in (CHART / "dashboards").glob("*.json")}
    found = {}
    for path, text in render(values).items():
        for name, dashboard in dashboards.items():
            text = text.replace(dashboard, f"    WHOLE dashboards/{name}")
        found[path] = re.sub(
            r"^( +(?:token|key|password|keys\.json|checksum/password)): \S+$", r"\1: RANDOM", text.strip(), flags=re.M
        )
    return found
