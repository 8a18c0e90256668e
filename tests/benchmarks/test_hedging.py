"""Hedges reach their goal on simulated engines, and do no harm where they cannot help."""

from __future__ import annotations

import json

import pytest

from benchmarks.gateway.hedging import main

SMALL = ["--seeds", "1", "--warm-up", "500", "--requests", "1000"]


@pytest.mark.parametrize("scenario", ["slow", pytest.param("items", marks=pytest.mark.slow)])
def test_one_slow_engine_of_four(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--scenarios", scenario]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])[scenario]
    assert report["with hedges"]["p99_ms"] <= 0.4 * report["without hedges"]["p99_ms"]
    assert report["with hedges"]["load"] <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["mixed", "overload"])
def test_no_harm(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--scenarios", scenario]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])[scenario]
    for name in ("p50_ms", "p95_ms", "p99_ms"):
        assert report["with hedges"][name] <= 1.3 * report["without hedges"][name]
    assert report["with hedges"]["load"] <= 1.02
