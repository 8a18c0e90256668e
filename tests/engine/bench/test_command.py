"""The commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from engine.bench.gpu import Part, run_parts
from tests.checkpoints import make_checkpoint


def bench(*arguments: str) -> dict:
    """The last line on standard output."""
    command = [sys.executable, "-m", "engine.bench", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_beats_transformers():
    summary = bench("score", "--offline", "--no-sweeps", "--repeats", "5")
    assert summary["largest_difference"] <= 1e-4
    assert summary["ratio"] >= 1.3
    assert 0 < summary["roofline"]["percent_of_peak_flops"] < 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_online_from_end_to_end(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    out = tmp_path / "out"
    rates = ["--rates", "50,100", "--seconds", "1", "--quick"]
    online = bench("score", "--online", "--model", str(model), *rates, "--out", str(out))["online"]
    assert [run["items_per_s_offered"] for run in online["rates"]] == [50, 100]
    assert [run["requests"] for run in online["rates"]] == [5, 10]
    assert all(run["failures"] == {} and run["p50_ms"] <= run["p99_ms"] for run in [*online["rates"], *online["repeated"]])
    assert [run["repeated"] for run in online["repeated"]] == [0.0, 0.5, 0.9]
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "online rate" for row in rows) == 15
    assert (out / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert "P99" in (out / "tables.txt").read_text()
    assert "<svg" in (out / "latency.svg").read_text()
    assert json.loads((out / "summary.json").read_text())["online"] == online


def test_a_server_that_cannot_start_says_why(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    (model / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "engine.bench", "score", "--online", "--model", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "There is no tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_command_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "engine.bench", "gpu", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "bench: torch finds no NVIDIA GPU on this machine; run this command on one that has it.\n"
    assert not (tmp_path / "out").exists()


def test_parts_fail_and_run_late_without_stopping_the_next(tmp_path):
    todo = [
        Part("late", ["http.server", "0"], 1.0),
        Part("broken", ["no_such_module"], 30.0),
        Part("well", ["platform"], 30.0),
    ]
    late, broken, well = run_parts(todo, tmp_path, 60.0)
    assert late["ended"] == "out of time after 1 s"
    assert broken["ended"] == "exit code 1"
    assert broken["last_line"].endswith("No module named no_such_module")
    assert well["ended"] == "well"
    assert (tmp_path / "well.txt").read_text().strip() == well["last_line"]


def test_no_part_begins_after_the_limit(tmp_path):
    (part,) = run_parts([Part("well", ["platform"], 30.0)], tmp_path, 0.0)
    assert (part["ended"], part["last_line"]) == ("no time left", "")
