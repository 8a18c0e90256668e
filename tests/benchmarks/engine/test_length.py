"""The benchmark of length guidance: its arithmetic, its ablations, its command."""

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
from benchmarks.engine.length_ablations import VARIANTS, YARDSTICK, guided_by
from benchmarks.engine.stages import REST, Stages
from benchmarks.engine.subject import SMALL
from benchmarks.engine.writers import QWEN25_7B, QWEN25_15B, Writer, Writing, guided_flops_ratio, random_pair, survivors
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
    mix = dataclasses.replace(FEW, sampling=length.mixed(writer, FEW))
    assert 1 < survivors(writer, mix, np.random.default_rng(0)) <= 3


def drawn(writer: Writer, writing: Writing) -> list[list[int]]:
    """The tokens of each text."""
    replies = writer.write(writing.requests(np.random.default_rng(1), writer.vocab_size, [True] * writing.rows)).values()
    return [[token for delta in deltas for token in delta.tokens] for deltas in replies]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != YARDSTICK])
@pytest.mark.parametrize("load", ["five candidates", "survivor mix"])
def test_ablations_draw_the_very_tokens_of_the_engine(writer: Writer, variant: str, load: str) -> None:
    writing = FEW if load == "five candidates" else dataclasses.replace(FEW, sampling=length.mixed(writer, FEW))
    expected = drawn(writer, writing)
    assert {len(tokens) for tokens in expected} == {writing.output}
    with guided_by(writer.loop, VARIANTS[variant]):
        assert drawn(writer, writing) == expected
    assert drawn(writer, writing) == expected


def test_ablations_do_what_their_names_say(writer: Writer) -> None:
    def lenvm_tokens(variant: str) -> int:
        writer.loop._scheduler.cache.clear()
        before = writer.loop.stats.lenvm_tokens
        passes = 0
        forward = writer.loop._runner._lenvm._model.forward

        def counted(tokens: torch.Tensor, *rest: object) -> torch.Tensor:
            nonlocal passes
            passes += len(tokens)
            return forward(tokens, *rest)

        writer.loop._runner._lenvm._model.forward = counted
        try:
            with guided_by(writer.loop, VARIANTS[variant]):
                drawn(writer, FEW)
        finally:
            del writer.loop._runner._lenvm._model.forward
        assert writer.loop.stats.lenvm_tokens > before
        return passes

    drawn(writer, FEW)  # the length model keeps the prompts
    steps = FEW.rows * (FEW.output - 1)  # the first draw has its prompt's last token pending
    assert lenvm_tokens("no adoption") - lenvm_tokens(YARDSTICK) == pytest.approx(steps, abs=FEW.rows)


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
    assert math.isfinite(summary["beside"]["excess"])
    assert summary["mean_tokens_by_scale"]["-40.0"] < summary["mean_tokens_by_scale"]["40.0"]
    assert {name for load in summary["ablations_ms"].values() for name in load} == set(VARIANTS)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    rows = [msgspec.json.decode(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert {row["kind"] for row in rows} == {"guided step", "beside", "guided ablation", "length"}
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
