"""The benchmarks of catalogues run, and their figures are plausible."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine.catalogue import main
from benchmarks.gateway.placement import main as placement


@pytest.mark.slow
def test_cached_items_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--items",
        "12",
        "--per-request",
        "6",
        "--item-tokens",
        "60",
        "--query-tokens",
        "4",
        "--warm-up",
        "4",
        "--rounds",
        "1",
    ]
    assert main(options) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["all cached, ratio"] > 1
    assert 0 <= report["hit rate, part cached"] <= 1


def test_replicas_share_a_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert placement(["--items", "400", "--item-tokens", "36", "--requests", "150", "--per-request", "40"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["throughput beside one replica with all slots"] > 3
    assert report["hit rate"] > report["hit rate of one replica with all slots"] - 0.05
    assert report["items that a further replica takes"] == pytest.approx(0.2, abs=0.07)
