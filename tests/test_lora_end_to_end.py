"""Adapters with real engines and a real gateway: scores are those of merged weights, whichever engine answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import merge, write_adapter
from tests.processes import Pod, gateway_before, wait_until

pytestmark = pytest.mark.slow

QUERY, ITEMS, LABELS = "Is it red? ", ["red shoes", "an oak table", "blue"], [5, 6]
TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def score(client: httpx.Client, model: str, query: str = QUERY) -> httpx.Response:
    body = {"model": model, "query": query, "items": ITEMS, "label_token_ids": LABELS}
    return client.post("/v1/score", json=body, headers={"cache-control": "no-cache"})


def expected(model: Path, whole: Any) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for item in ITEMS:
        ids = torch.tensor([tokenizer(QUERY + item, add_special_tokens=False).input_ids])
        with torch.no_grad():
            rows.append(pytest.approx(whole(ids).logits[0, -1].softmax(-1)[LABELS].tolist(), abs=1e-5))
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def merged(model: Path, root: Path) -> dict[str, Any]:
    """Models of transformers by the names of the adapters that are merged into them."""
    whole = {
        name: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for name in ("tiny", "fixed", "one", "two")
    }
    for seed, name in enumerate(("fixed", "one", "two")):
        merge(whole[name], write_adapter(root / name, whole[name], TARGETS, seed=seed))
    return whole


@pytest.fixture
def pods(model: Path, root: Path, merged: dict[str, Any]) -> Iterator[list[Pod]]:
    arguments = ("--name", "tiny", "--lora", f"fixed={root / 'fixed'}", "--lora-root", str(root))
    pods = [Pod(model, *arguments) for _ in range(2)]
    yield pods
    for pod in pods:
        pod.close()


@pytest.fixture
def client(pods: list[Pod]) -> Iterator[httpx.Client]:
    with gateway_before(*pods, YARDSTICK_PROBE_SECONDS="0.1", YARDSTICK_SPLIT_TOKENS="1") as program:
        yield program.client


def test_adapters_score_as_merged_weights(client: httpx.Client, pods: list[Pod], model: Path, root: Path, merged: Any) -> None:
    load = {"lora_name": "mine", "lora_path": str(root / "one")}
    assert client.post("/v1/load_lora_adapter", json=load).json()["engines"] == 2
    names = {"tiny": "tiny", "fixed": "fixed", "tiny:fixed": "fixed", "mine": "one", "tiny:mine": "one"}
    for name, weights in names.items():
        for _ in range(2):
            answer = score(client, name).raise_for_status().json()
            assert (answer["model"], answer["scores"]) == (name, expected(model, merged[weights]))
    listed = {each["id"]: each["parent"] for each in client.get("/v1/models").json()["data"]}
    assert listed == {"tiny": None, "fixed": "tiny", "mine": "tiny"}
    for path, replace in ((root / "two", False), (root.parent, True), (root / ".." / "etc", True), (Path("/etc"), True)):
        body = {"lora_name": "mine", "lora_path": str(path), "load_inplace": replace}
        refused = client.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 400, path
        assert str(root.parent) not in refused.text
    odd = shutil.copytree(root / "two", root / "odd") / "adapter_config.json"
    odd.write_text(json.dumps(json.loads(odd.read_text()) | {"rank_pattern": {"(?=q)q_proj": 4}}))
    refused = client.post("/v1/load_lora_adapter", json=load | {"lora_path": str(odd.parent), "load_inplace": True})
    assert (refused.status_code, "no look-around" in refused.json()["error"]["message"]) == (400, True)
    assert score(client, "mine").json()["scores"] == expected(model, merged["one"])
    body = {"lora_name": "mine", "lora_path": str(root / "two"), "load_inplace": True}
    client.post("/v1/load_lora_adapter", json=body).raise_for_status()
    assert score(client, "mine").json()["scores"] == expected(model, merged["two"])
    script = Path(__file__).parents[1] / "examples" / "clients" / "adapter.py"
    command = [sys.executable, str(script), str(client.base_url), str(root / "one"), "example"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert (lines[0], len(lines)) == ("tiny:example is on 2 engines", 3)
    assert lines[1].removeprefix("tiny ") != lines[2].removeprefix("tiny:example ")
    client.post("/v1/unload_lora_adapter", json={"lora_name": "example"}).raise_for_status()
    pods[0].process.kill()
    pods[0].close()
    pods[0] = Pod(model, "--name", "tiny", "--lora-root", str(root), port=pods[0].port)
    pods[0].wait_ready()
    done = 'yardstick_adapter_operations_total{operation="restore",result="done"} 1.0'
    wait_until(lambda: done in client.get("/metrics").text, 30)
    for place in range(4):
        score(client, "mine", f"{place} {QUERY}").raise_for_status()
    assert score(client, "mine").json()["scores"] == expected(model, merged["two"])
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).json()["engines"] == 2
    assert score(client, "mine").json()["error"]["code"] == "model_not_found"
