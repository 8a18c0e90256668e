"""``yardstick lenvm sample``, ``train`` and ``evaluate`` on the demo model and on a GGUF file, and the result as served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random

import httpx
import pytest

from tests import weights
from tests.checkpoints import make_checkpoint
from tests.gguf_files import SHAPE, write_gguf
from tests.processes import Pod, Program, gateway_before
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.training.__main__ import main as training

COLOURS = ["red", "crimson", "blue", "azure", "green", "black", "white", "grey"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "length_model"
KINDS = ["shoes", "jacket", "tent", "scarf"]


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[Program]:
    with Pod(model, "--name", "demo", "--max-total-tokens", "16384", *arguments) as pod, gateway_before(pod) as gateway:
        yield gateway


def yardstick(*arguments: object) -> str:
    command = [sys.executable, "-m", "yardstick_llm.gateway.cli", "lenvm", *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        yardstick("sample", *given)
    given = ("--data", data, "--init", base, "--out", model, "--lr", 1e-3, "--epochs", 3, "--tokens-per-step", 1500)
    yardstick("train", *given, "--checks", 4)
    facts = json.loads((model / "lenvm.json").read_text())
    history = facts["training"]["history"]
    assert min(each["loss"] for each in history) < history[0]["loss"] - 0.01
    with serving(base, "--lenvm-model", str(model)) as gateway:
        shown = httpx.get(f"{gateway.url}/v1/models").json()["data"][0]
        assert (shown["lenvm_gamma"], shown["lenvm_calibration"]) == (facts["gamma"], facts["calibration"])
        given = ("--data", data, "--lenvm", model, "--out", report, "--base-url", f"{gateway.url}/v1", "--targets", "20")
        out = yardstick("evaluate", *given)
    found = json.loads((report / "report.json").read_text())
    rows = {(row["rule"], row["target"]): row for row in found["served"]}
    assert rows["guided", 20]["deviation"]["mean"] < 0.5 * rows["unguided", 20]["deviation"]["mean"], out
    assert rows["guided", 20]["ended"]["mean"] > 0.8
    assert found["offline"]["ends_within"]["16"] > 0.75
    assert found["offline"]["coverage"]["0.9"]["share"]["mean"] > 0.7
    assert f"{found['offline']['answers']} answers" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_length_model_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampled, trained from the file's own first layers, and served beside it. These are too few answers to learn from. What needs
    the engine runs in this process, which saves imports."""
    base, prompts, data, model, report = (tmp_path / name for name in ("small.gguf", "prompts.txt", "data", "model", "report"))
    write_gguf(make_checkpoint(tmp_path / "checkpoint", "llama", **SHAPE), base, "Q4_1")
    prompts.write_text("\n".join(f"Say something about a {colour} {kind}." for colour in COLOURS for kind in KINDS[:2]))
    with serving(base) as gateway:
        given = ("--base-url", gateway.url, "--out", data, "--prompts", prompts, "--max-tokens", 24, "--samples", 1, "--branch", 1)
        given += ("--test-share", 0.3, "--validation-share", 0.3, "--allow-censored", "--concurrency", 16)
        yardstick("sample", *given)
    few = f"train --data {data} --init {base} --out {model} --layers 2 --method adapter --epochs 1 --lr 1e-4 --checks 1"
    assert training(f"{few} --allow-censored --gamma 0.95 --margin 0.5 --tokens-per-pass 512".split()) == 0
    assert not (model / "tokenizer.json").exists()
    with serving(base, "--lenvm-model", str(model)) as gateway:
        guide = {"length_guidance": {"max_length": {"at_most": 8}}, "max_tokens": 24, "temperature": 0}
        answer = gateway.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}], **guide})
        assert answer.status_code == 200, answer.text
        (entry,) = gateway.client.post("/v1/length", json={"input": "Hello"}).json()["data"]
        assert 0 < entry["value"] < 1
        low, high = entry["intervals"]["0.9"]
        assert 1 <= low <= high  # of these few cut answers, often equal
    assert training(f"evaluate --data {data} --lenvm {model} --init {base} --out {report}".split()) == 0
    assert "answers to" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_length_model_among_the_examples_steers_smollm2() -> None:
    """Its README has the model's name. Without guidance, the mean distance is 0.7 or more (docs/length.md)."""
    questions = "Why is the sky blue?", "What is a good breakfast?", "How do birds fly?", "What does a manager do?"
    with Pod(weights.smollm2(), "--max-total-tokens", "8192", "--lenvm-model", str(EXAMPLE)) as pod, gateway_before(pod) as gateway:
        shown = gateway.client.get("/v1/models").json()["data"][0]
        assert shown["id"] == "SmolLM2-135M-Instruct.Q4_1"
        assert shown["id"] in (EXAMPLE / "README.md").read_text()
        assert shown["lenvm_gamma"] == json.loads((EXAMPLE / "lenvm.json").read_text())["gamma"]

        def distance(asked: tuple[str, int]) -> float:
            question, target = asked
            messages = [{"role": "system", "content": "Answer in one short sentence."}, {"role": "user", "content": question}]
            guide = {"length_guidance": {"target_length": target, "constraint": "about"}, "seed": target}
            answer = gateway.client.post("/v1/chat/completions", json={"messages": messages, "top_k": 5, **guide}, timeout=200)
            assert answer.status_code == 200, answer.text
            return abs(answer.json()["usage"]["completion_tokens"] - 1 - target) / target

        with ThreadPoolExecutor(8) as threads:  # one step for all, which reads the weights once
            distances = [*threads.map(distance, product(questions, (40, 80)))]
    assert sum(distances) / len(distances) < 0.4, distances
