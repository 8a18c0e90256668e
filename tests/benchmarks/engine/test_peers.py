"""Scoring beside other runtimes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine import peers
from kernels.int8 import instructions
from kernels.linear import multiplies_bfloat16
from tests.checkpoints import make_checkpoint


@pytest.mark.slow
def test_runtimes_that_are_missing_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    arguments = ["--model", str(model), "--rounds", "1", "--formats", "float32", "--out", str(tmp_path / "out")]
    assert peers.main([*arguments, "--openvino", sys.executable]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["left_out"]["llamacpp, float32"] == "--llamacpp names no Python"
    assert "exit code 1" in summary["left_out"]["openvino, float32"]  # this environment has no OpenVINO
    assert summary["ratios"].keys() == {"Yardstick, float32", "transformers, float32"}
    assert summary["largest_difference"]["transformers, float32"] < 1e-4
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert "left out: openvino, float32" in (tmp_path / "out" / "tables.txt").read_text()


@pytest.mark.skipif(instructions() is None, reason="the processor does not multiply bytes")
def test_the_engine_is_measured_in_int8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    assert peers.main(["--model", str(model), "--rounds", "1"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1e-4 < summary["largest_difference"]["Yardstick, int8"] < 1
    assert (
        summary["cpu_ratios"].keys()
        == summary["ratios"].keys()
        == {f"Yardstick, {form}" for form in peers.FORMATS} | {"transformers, float32"}
    )


@pytest.mark.slow
@pytest.mark.skipif(instructions() is None or not multiplies_bfloat16(), reason="the processor has no such products")
def test_a_runtime_without_bfloat16_is_left_out_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    formats = ["--formats", "float32,bfloat16-int8"]
    assert peers.main(["--model", str(model), "--rounds", "1", *formats, "--llamacpp", sys.executable]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["left_out"]["llamacpp, bfloat16-int8"] == "it has no bfloat16 on a CPU"
    assert 1e-4 < summary["largest_difference"]["Yardstick, bfloat16-int8"] < 1
