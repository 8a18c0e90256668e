"""The benchmarks of the gateway, with few requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.gateway.encoders import LIBRARIES


@pytest.mark.slow
def test_it_counts_the_gateway_and_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["modules", "--requests", "2", "--list"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    counts = json.loads(last)
    assert counts.keys() == {"score", "chat", "response"}
    for kind in counts.values():
        assert kind["functions"] >= kind["modules"] > 10
    assert counts["score"]["worker_modules"] > 5  # its texts are long
    listed = {tuple(line.split()[:2]) for line in lines if line.startswith("  ")}
    assert len({module for process, module in listed if process == "gateway"}) > 10


@pytest.mark.slow
def test_it_measures_this_checkout_and_another(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).parents[3])
    assert main(["gateway", "--requests", "10", "--rounds", "1", "--against", here]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["memory, hit"] > 0
    assert min(summary["ratios"].values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_encoders_and_all_libraries_compute_the_same(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """But Infinity, whose environment takes longer to install than all of them to measure."""
    assert main(["encoders", "--quick", "--formats", "float32", "--texts", "2", "--out", str(tmp_path)]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["left_out"] == {}
    assert {name.removesuffix(", float32") for name in summary["versions"]} == set(LIBRARIES)
    assert len(summary["texts_per_s"]) == 6
    for programs in summary["texts_per_s"].values():
        assert all(rate["median"] > 0 for rate in programs.values())
        assert len(programs) == 1 + len(summary["versions"])
    assert max(summary["largest_difference"].values()) < 1e-4
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_library_that_is_missing_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """As in run c of the GPU benchmark, on a machine without sentence-transformers; and with two engines."""
    asked = "--family modernbert --libraries sentence-transformers --formats bfloat16 --engines 2 --quick"
    assert main(["encoders", *asked.split(), "--python", sys.executable]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert ([*summary["left_out"]], summary["engines"]) == (["sentence-transformers, bfloat16"], 2)
    assert all(programs["Yardstick, bfloat16"]["median"] > 0 for programs in summary["texts_per_s"].values())
