"""The benchmarks of the gateway, with few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


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
    assert main(["rerank-cpu", "--requests", "4", "--rounds", "1", "--against", here]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < summary["gateway, 1 short, CPU"] < summary["gateway, 20 long, CPU"]
    assert summary["ratios"]["gateway / other checkout, 5 short, CPU"] > 0
