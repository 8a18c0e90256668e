"""The commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engine.engines import Engine, Transformers
from benchmarks.engine.load import Workload
from benchmarks.engine.subject import subject
from tests.checkpoints import make_checkpoint


def bench(*arguments: str) -> dict:
    """The last line on standard output."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_the_engine_beats_transformers():
    summary = bench("score", "--repeats", "3")
    assert summary["largest_difference"] <= 1e-4
    assert summary["ratio"] >= 1.2, "docs/benchmarks has the ratio of a quiet machine; this is a bound that a busy one holds too"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_online_from_end_to_end(tmp_path, in_this_process, capsys):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    out = tmp_path / "out"
    rates = ["--rates", "50,100", "--seconds", "1", "--quick"]
    assert main(["score", "--online", "--model", str(model), *rates, "--out", str(out)]) == 0
    online = json.loads(capsys.readouterr().out.splitlines()[-1])["online"]
    assert [run["items_per_s_offered"] for run in online["rates"]] == [50, 100]
    assert [run["requests"] for run in online["rates"]] == [5, 10]
    assert all(run["failures"] == {} and run["p50_ms"] <= run["p99_ms"] for run in online["rates"])
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "online rate" for row in rows) == 15
    assert "P99" in (out / "tables.txt").read_text()
    assert json.loads((out / "summary.json").read_text())["online"] == online


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_it_in_fp8(tmp_path, in_this_process, capsys):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    command = "score --offline --online --quick --max-batched-tokens 512 --workload 30/20/4 --quantize fp8 --repeats 1"
    assert main([*command.split(), "--rates", "50", "--seconds", "1", "--model", str(model)]) == 0
    said = capsys.readouterr().out.splitlines()
    summary = json.loads(said[-1])
    assert any("float32, FP8" in line for line in said)
    assert 1e-3 < summary["largest_difference"] < 1.5  # from transformers, which computes in float32
    assert summary["online"]["rates"][0]["failures"] == {}
    assert (summary["workload"], summary["max_batched_tokens"]) == ("30/20/4", 512)
    assert summary["online"]["rates"][0]["requests"] == 12, "50 items/s for one second, four a request"
    queued = summary["queued"]
    assert queued["engine_items_per_s"] > 0 < min(queued["transformers_items_per_s"].values())


def test_a_batch_of_prompts_may_end_within_a_request(tmp_path):
    model, rng = make_checkpoint(tmp_path / "model", "qwen3"), np.random.default_rng(0)
    with subject("small", str(model), "float32") as measured:
        peer, engine = Transformers(measured, torch.device("cpu")), Engine(measured.load(), "float32", max_total_tokens=1024)
        messages = [Workload(9, 5, 4).request(str(place), rng, measured.config.vocab_size) for place in range(3)]
        expected = engine.score_all(messages)
        for batch in (3, 12, 100):
            np.testing.assert_allclose(peer.score_all(messages, batch), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--quantize fp8", "--quantize fp8 takes matrices whose sides are multiples of 16"),
        ("--max-batched-tokens 0", "--max-batched-tokens"),
        ("", "There is no tokenizer.json"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, options, told, in_this_process, capsys):
    """So the options reach it."""
    model = make_checkpoint(tmp_path / "model", "qwen3", intermediate_size=72)
    if not options:
        (model / "tokenizer.json").unlink()
    assert main(["score", "--online", "--model", str(model), *options.split()]) == 1
    found = capsys.readouterr().err
    assert told in found
    assert "Traceback" not in found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_command_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--run", "a", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "bench: torch finds no NVIDIA GPU on this machine; run this command on one that has it.\n"
    assert not (tmp_path / "out").exists()
