"""The benchmark of length guidance: its loads, its command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engine.subject import SMALL
from benchmarks.engine.writing import PLAIN, Writing, mixed, random_pair, survivors

FEW = Writing(4, 12, 10)


@pytest.mark.slow
def test_random_weights_keep_activations_near_one() -> None:
    base = dataclasses.replace(SMALL, vocab_size=512, num_layers=2, tied=False, qkv_bias=True)
    pair = random_pair(base, dataclasses.replace(base, hidden_size=256), torch.device("cpu"), "float32")
    engine = pair.engine(1024, 4)
    assert 1 < survivors(engine, FEW, np.random.default_rng(0)) <= 5
    mix = dataclasses.replace(FEW, sampling=mixed(engine, FEW))
    assert 1 < survivors(engine, mix, np.random.default_rng(0)) <= 3


def test_plain_texts_are_sampled_as_users_sample_them() -> None:
    assert (PLAIN.top_k, PLAIN.top_p, PLAIN.min_p, PLAIN.temperature) == (0, 1.0, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command(tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["length", "--quick", "--rows", "4", "--output", "6", "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    (cost,) = summary["rows"].values()
    assert cost["ratio"] > 1
    assert min(cost["top_k_ratio"], cost["mix_ratio"]) > 0
    assert cost["plain_tokens_per_s"] == pytest.approx(4000 / cost["plain_ms"])
    assert cost["guided_tokens_per_s"] < cost["plain_tokens_per_s"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    rows = [msgspec.json.decode(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert {row["kind"] for row in rows} == {"guided step"}
