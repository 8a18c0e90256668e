"""``yardstick lenvm sample``, ``train`` and ``evaluate`` on the demo model, each killed and continued, and the result as served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from tests import weights
from tests.processes import Pod, Program
from yardstick_llm.engine.demo import MODELS

COLOURS = ["red", "crimson", "blue", "azure", "green", "black", "white", "grey"]
KINDS = ["shoes", "jacket", "tent", "scarf", "backpack", "boots", "gloves", "hat"]


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[Program]:
    pod = Pod(model, "--name", "demo", *arguments).wait_ready()
    gateway = Program("gateway", "--engine", pod.url)
    yield gateway.wait_ready()
    gateway.close()
    pod.close()


def yardstick(*arguments: object, kill_after: float | None = None, limit: float = 250) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "yardstick_llm.gateway.cli", "lenvm", *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            out, err = process.communicate(timeout=kill_after or limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            assert kill_after is not None, err
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_length_model_is_made_and_served(tmp_path: Path) -> None:
    lot = Random(0)
    prompts, data, model, report = (tmp_path / name for name in ("prompts.txt", "data", "model", "report"))
    pairs = [f"Describe: {colour} {kind}" for colour in COLOURS for kind in KINDS]
    prompts.write_text("\n".join(lot.sample(pairs, len(pairs))))
    base = MODELS / "base"
    with serving(base) as gateway:
        given = ("--base-url", gateway.url, "--out", data, "--prompts", prompts, "--max-tokens", 250, "--samples", 3)
        given += ("--test-share", 0.2, "--validation-share", 0.2, "--stray", 0.1, "--concurrency", 16)
        yardstick("sample", *given, kill_after=6)
        status, _, err = yardstick("sample", *given)
        assert status == 0, err
    trained = ("--data", data, "--init", base, "--out", model, "--lr", 1e-3, "--epochs", 6, "--tokens-per-step", 1500)
    trained += ("--save-minutes", 0.01, "--resume")
    yardstick("train", *trained, kill_after=15)
    status, _, err = yardstick("train", *trained)
    assert status == 0, err
    facts = json.loads((model / "lenvm.json").read_text())
    history = facts["training"]["history"]
    assert min(each["loss"] for each in history) < history[0]["loss"] - 0.01
    with serving(base, "--lenvm-model", str(model)) as gateway:
        shown = httpx.get(f"{gateway.url}/v1/models").json()["data"][0]
        assert (shown["lenvm_gamma"], shown["lenvm_calibration"]) == (facts["gamma"], facts["calibration"])
        given = ("--data", data, "--lenvm", model, "--out", report, "--base-url", f"{gateway.url}/v1", "--targets", "20,40")
        status, out, err = yardstick("evaluate", *given)
        assert status == 0, err
    found = json.loads((report / "report.json").read_text())
    rows = {(row["rule"], row["target"]): row for row in found["served"]}
    assert rows["guided", 20]["deviation"]["mean"] < 0.5 * rows["unguided", 20]["deviation"]["mean"], out
    assert rows["guided", 20]["ended"]["mean"] > 0.8
    assert found["offline"]["ends_within"]["16"] > 0.75
    assert found["offline"]["coverage"]["0.9"]["share"]["mean"] > 0.7
    assert f"{found['offline']['answers']} answers" in out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_length_model_of_a_gguf_file(tmp_path: Path) -> None:
    """SmolLM2 as published: sampled, trained from its own first layers, and served beside it. These are too few answers to learn
    from."""
    prompts, data, model, report = (tmp_path / name for name in ("prompts.txt", "data", "model", "report"))
    base = weights.smollm2()
    prompts.write_text("\n".join(f"Say something about a {colour} {kind}." for colour in COLOURS for kind in KINDS[:2]))
    serve = ("--max-total-tokens", "4096", "--max-wait-seconds", "900")
    with serving(base, *serve) as gateway:
        given = ("--base-url", gateway.url, "--out", data, "--prompts", prompts, "--max-tokens", 24, "--samples", 1, "--branch", 1)
        given += ("--test-share", 0.3, "--validation-share", 0.3, "--allow-censored", "--concurrency", 16)
        status, _, err = yardstick("sample", *given, limit=900)
        assert status == 0, err
    trained = ("--data", data, "--init", base, "--out", model, "--layers", 6, "--method", "lora")
    trained += ("--epochs", 1, "--lr", 1e-4, "--checks", 1)
    trained += ("--allow-censored", "--gamma", 0.95, "--margin", 0.5, "--tokens-per-pass", 512)
    status, _, err = yardstick("train", *trained, limit=900)
    assert status == 0, err
    assert (model / "tokenizer.json").exists()
    with serving(base, "--lenvm-model", str(model), *serve) as gateway:
        guide = {"length_guidance": {"max_length": {"at_most": 8}}, "max_tokens": 24, "temperature": 0}
        answer = gateway.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}], **guide})
        assert answer.status_code == 200, answer.text
        (entry,) = gateway.client.post("/v1/length", json={"input": "Hello"}).json()["data"]
        assert 0 < entry["value"] < 1
        low, high = entry["intervals"]["0.9"]
        assert 1 <= low <= high  # of these few cut answers, often equal
    status, out, err = yardstick("evaluate", "--data", data, "--lenvm", model, "--out", report, limit=900)
    assert status == 0, err
    assert "answers to" in out
