"""The benchmark of length guidance: its arithmetic, its command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engine import length, length_plot
from benchmarks.engine.stages import REST, Stages
from benchmarks.engine.subject import QWEN25_7B, QWEN25_15B, SMALL
from benchmarks.engine.writers import PLAIN, Writer, Writing, guided_flops_ratio, mixed, random_pair, survivors
from engine.lenvm import guided_draws

FEW = Writing(4, 12, 10)


@pytest.fixture(scope="module")
def pair() -> length.Pair:
    return length.load_pair("demo")


@pytest.fixture(scope="module")
def writer(pair: length.Pair) -> Writer:
    return pair.writer(4096, 8)


def test_the_published_shapes_cost_what_is_published_of_them() -> None:
    """14.24 GFLOP a plain token; 83 % of 16.00 more for five candidates (arXiv 2604.27039's timing study)."""
    assert guided_flops_ratio(QWEN25_7B, QWEN25_15B, 100) == pytest.approx(1 + 0.83 * 16.00 / 14.24, rel=0.02)


@pytest.mark.slow
def test_random_weights_keep_activations_near_one() -> None:
    base = dataclasses.replace(SMALL, vocab_size=512, num_layers=2, tied=False, qkv_bias=True)
    decoder, model = random_pair(base, dataclasses.replace(base, hidden_size=256), torch.device("cpu"), torch.float32)
    writer = Writer(decoder, model, "float32", slots=1024, rows=4)
    assert 1 < survivors(writer, FEW, np.random.default_rng(0)) <= 5
    mix = dataclasses.replace(FEW, sampling=mixed(writer, FEW))
    assert 1 < survivors(writer, mix, np.random.default_rng(0)) <= 3


def test_plain_texts_are_sampled_as_users_sample_them() -> None:
    assert (PLAIN.top_k, PLAIN.top_p, PLAIN.min_p, PLAIN.temperature) == (0, 1.0, 0.0, 1.0)


def drawn(writer: Writer, writing: Writing) -> list[list[int]]:
    """The tokens of each text."""
    replies = writer.write(writing.requests(np.random.default_rng(1), writer.vocab_size, [True] * writing.rows)).values()
    return [[token for delta in deltas for token in delta.tokens] for deltas in replies]


def test_stages_add_up_and_leave_nothing_behind(writer: Writer) -> None:
    stages = Stages(gpu=False)
    runner = writer.loop._runner
    before = [dict(vars(owner)) for owner in (runner._decoder, runner._lenvm, guided_draws)]
    with stages.timed(writer.loop):
        drawn(writer, FEW)
    taken = stages.shares(1000.0)
    assert sum(taken.values()) == pytest.approx(1000.0)
    assert all(seconds > 0 for seconds in taken.values()), taken
    assert taken[REST] > 900
    assert [dict(vars(owner)) for owner in (runner._decoder, runner._lenvm, guided_draws)] == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command(tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(length_plot, "LIMIT", 100)
    assert main(["length", "--quick", "--rows", "4", "--output", "6", "--texts", "3", "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    (cost,) = summary["rows"].values()
    assert cost["ratio"] > 1
    assert min(cost["top_k_ratio"], cost["mix_ratio"]) > 0
    assert cost["plain_tokens_per_s"] == pytest.approx(4000 / cost["plain_ms"])
    assert cost["guided_tokens_per_s"] < cost["plain_tokens_per_s"]
    assert math.isfinite(summary["beside"]["excess"])
    assert summary["mean_tokens_by_scale"]["-40.0"] < summary["mean_tokens_by_scale"]["40.0"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    rows = [msgspec.json.decode(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert {row["kind"] for row in rows} == {"guided step", "beside", "length"}
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
