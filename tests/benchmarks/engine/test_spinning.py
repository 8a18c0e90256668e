"""The benchmark of threads that wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import spinning


def test_settings() -> None:
    assert spinning.environment("Yardstick") == {}
    assert spinning.environment("passive") == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert spinning.environment("500") == {"GOMP_SPINCOUNT": "500"}


def test_the_order_of_settings_alternates() -> None:
    assert [spinning.in_turn(["a", "b", "c"], place) for place in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rounds", "1", "--streams", "2", "--tokens", "4", "--scores", "1"]
    assert spinning.main(["--settings", "Yardstick,spin", *sizes, "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(ratio["spin"] > 0 for ratio in summary["ratios"].values())
    assert all(kept["Yardstick"] > 0 for kept in summary["of quiet"].values())
    assert len(summary["ratios"]) == 2 * len(summary["of quiet"]) == 4
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_engines_of_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rounds", "1", "--streams", "0", "--scores", "4", "--at-once", "1,2"]
    assert spinning.main(["--settings", "engines,engines-4096", *sizes]) == 0
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"]
    assert set(ratios) == {
        f"scored items/s{many}, {load}" for many in ("", ", 2 requests at a time") for load in (spinning.QUIET, spinning.SHARED)
    }
    assert all(ratio["engines-4096"] > 0 for ratio in ratios.values())
