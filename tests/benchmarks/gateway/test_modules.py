"""The count of the gateway's modules that a request passes."""

from __future__ import annotations

import json

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
