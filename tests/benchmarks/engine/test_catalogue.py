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
        "--family",
        "3",
        "--common-tokens",
        "20",
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
    assert report["none cached, ratio"] < report["part cached, expected, logits, ratio"] <= report["all cached, logits, ratio"]


SMALL = ["--items", "1000", "--item-tokens", "90", "--query-tokens", "10", "--requests", "200"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, []], ids=["small", "2000 items"])
def test_replicas_share_a_catalogue(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The simulation is deterministic, so its limits are those that placement has to keep."""
    assert placement(options) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["throughput beside one replica of the same size"] >= 3.6
    assert report["throughput beside one replica with all slots"] >= 3.6
    assert report["hit rate"] >= report["hit rate of one replica with all slots"] - 0.02
    assert 0.15 <= report["items that a further replica takes"] <= 0.25
