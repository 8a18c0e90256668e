"""The benchmark of the host's time: each case in a few steps, and the clock that times are scaled by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.host import HERE, clock_rate, in_process, main, summary

TOKENS = {"score": 8192, "catalogue": 8192, "decode": 256, "guided": 256, "structured": 32}
"""Tokens of a step. Structured rows wait for their masks, so each step has half of the 64."""


@pytest.mark.slow
@pytest.mark.parametrize("case", TOKENS)
def test_each_case_measures_full_steps(case: str) -> None:
    """In a process of its own, because null kernels take the place of the real ones."""
    found = in_process(HERE, case, steps=4)
    assert found["tokens"] == pytest.approx(TOKENS[case], rel=0.01)
    assert found["ms"] > 0
    assert found["gigahertz"] > 0.1


def test_it_tells_medians_and_ratios() -> None:
    here, there = ([{"ms": ms, "tokens": 8.0} for ms in times] for times in ((1.0, 2.0, 4.0), (2.0, 2.0, 2.0)))
    assert summary(here, there, 3.0) == {"ms": 2.0, "tokens": 8.0, "limit_ms": 3.0, "against_ms": 2.0, "ratio": 1.0}


@pytest.mark.slow
def test_it_compares_with_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--steps", "2", "--rounds", "1", "--against", str(HERE)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["decode"]["ratio"] > 0
    assert told["machine"]["commit"]


@pytest.mark.slow
def test_an_engine_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise ValueError('broken')")
    with pytest.raises(RuntimeError, match="broken"):
        in_process(tmp_path, "decode", steps=1)


def test_the_clock_has_a_plausible_rate() -> None:
    assert 1e8 < clock_rate() < 1e10
