"""Two adapters of the demo model, from a directory that every engine watches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.load import LABELS
from tests.helm.chart import Values, manifests

MAKE_ADAPTERS = """
import json, pathlib, torch
from safetensors.torch import save_file
config = json.loads(pathlib.Path("/opt/yardstick/demo/config.json").read_text())
width, heads = config["hidden_size"], config["num_attention_heads"]
rows = heads * (config.get("head_dim") or width // heads)
for seed, name in enumerate(("plain", "bold")):
    noise = torch.Generator().manual_seed(seed)
    folder, tensors = pathlib.Path("/adapters") / name, {}
    for layer in range(config["num_hidden_layers"]):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[key + "A.weight"] = torch.randn(4, width, generator=noise)
        tensors[key + "B.weight"] = torch.randn(rows, 4, generator=noise)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
"""
"""Writes two adapters, equal on every machine."""


def with_adapters() -> Values:
    """Values that give every engine the directory. A claim would need storage that engines on all nodes share."""
    engine = next(found for found in manifests({}) if found["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    mount = {"name": "tuned", "mountPath": "/adapters"}
    maker = {
        "name": "adapters",
        "image": engine["image"],
        "command": ["python", "-c", MAKE_ADAPTERS],
        "securityContext": engine["securityContext"],
        "volumeMounts": [mount],
    }
    return {
        "engine": {
            "lora": {"directory": "/adapters", "root": "/adapters"},
            "initContainers": [maker],
            "extraVolumes": [{"name": "tuned", "emptyDir": {}}],
            "extraVolumeMounts": [mount],
        }
    }


@pytest.fixture
def client(ingress: IngressProxy, release: Release) -> Iterator[httpx.Client]:
    """A client of gateways before engines with the adapters; afterwards there are none."""
    release.upgrade(with_adapters())
    headers = {"host": ingress.host, "authorization": f"Bearer {release.key}", "cache-control": "no-cache"}
    with httpx.Client(base_url=ingress.url, headers=headers, timeout=60) as client:
        yield client
    none: Values = {"lora": {"directory": "", "root": ""}, "initContainers": [], "extraVolumes": [], "extraVolumeMounts": []}
    release.upgrade({"engine": none})


def models(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in client.get("/v1/models").raise_for_status().json()["data"]}


def scores(client: httpx.Client, model: str) -> list[list[float]]:
    body = {"model": model, "query": "Query: red shoes\nItem: ", "items": ["a red shoe", "a blue hat"], "labels": LABELS}
    answer = client.post("/v1/score", json=body).raise_for_status().json()
    assert answer["model"] == model
    found: list[list[float]] = answer["scores"]
    return found


def test_the_chart_serves_two_adapters(client: httpx.Client, release: Release) -> None:
    wait_for(lambda: {"plain", "bold"} <= models(client).keys(), 60, "gateways know both adapters")
    listed = models(client)
    assert {listed[name]["parent"] for name in ("plain", "bold")} == {"yardstick-demo"}
    for pod in release.pods("gateway"):
        name = 'yardstick_adapters{model="yardstick-demo"}'
        wait_for(lambda pod=pod, name=name: release.gateway_metric(pod, name) == 2, 30, "every gateway knows both")
    found = {name: scores(client, name) for name in ("yardstick-demo", "plain", "yardstick-demo:bold")}
    rows = [tuple(number for row in each for number in row) for each in found.values()]
    assert len(set(rows)) == 3, "base and adapters have scores of their own"
    assert all(math.isfinite(number) for row in rows for number in row)
    for _ in range(8):  # on both engines
        for name, first in found.items():
            assert scores(client, name) == [pytest.approx(row, abs=1e-5) for row in first]
    text = client.post("/v1/completions", json={"model": "bold", "prompt": "A red", "max_tokens": 4}).raise_for_status().json()
    assert text["model"] == "bold"
    refused = client.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": "/adapters/plain"})
    assert refused.status_code == 403, "the chart's first key has no `admin`"
