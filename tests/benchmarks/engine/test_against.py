"""The engine beside that of another checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import against
from benchmarks.engine.line_process import ProcessEnded
from engine.serving.environment import HUGE_PAGES, with_defaults
from tests.checkpoints import make_checkpoint


def test_ratios_are_paired_and_above_one_where_the_other_is_slower() -> None:
    clocks = {"wall": [1.0, 2.0, 4.0], "cpu": [1.0, 1.0, 1.0]}
    found = against.summary_of({"here": clocks, "there": {"wall": [2.0, 2.0, 4.4], "cpu": [3.0, 3.0, 3.0]}})
    assert found["wall"] == {"here_ms": 2000, "there_ms": 2000, "ratio": pytest.approx(1.1), "least": 1.0, "most": 2.0}
    assert found["cpu"]["ratio"] == 3


def test_scores_that_differ_are_an_error() -> None:
    against.check_agreement("score", [[-1.0, -2.0]], [[-1.0, -2.0001]], tolerance=1e-3)
    against.check_agreement("decode 1", [[5, 6]], [[5, 7]], tolerance=1e-3)
    with pytest.raises(AssertionError, match="the scores differ"):
        against.check_agreement("score", [[-1.0, -2.0]], [[-1.0, -2.1]], tolerance=1e-3)
    with pytest.raises(AssertionError, match="differ in length"):
        against.check_agreement("decode 1", [[5, 6]], [[5]], tolerance=1e-3)


def test_each_checkout_has_its_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = with_defaults({})
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    for name, value in HUGE_PAGES.items():
        monkeypatch.setenv(name, value)  # as the benchmark's own process has it
    here = against.variables_of(against.HERE)
    assert here.items() >= (ours | {"OMP_WAIT_POLICY": "ACTIVE", "PYTHONPATH": str(against.HERE)}).items()
    before = against.variables_of(tmp_path)
    assert not before.keys() & HUGE_PAGES.keys()
    assert {name: here[name] for name in before.keys() & ours.keys()} == {
        name: before[name] for name in ours.keys() - HUGE_PAGES.keys()
    }
    (tmp_path / "engine" / "serving").mkdir(parents=True)
    (tmp_path / against.ENVIRONMENT).write_text("def with_defaults(environment): return {**environment, 'OTHER': '1'}")
    other = against.variables_of(tmp_path)
    assert other["OTHER"] == "1"
    assert other["OMP_WAIT_POLICY"] == "ACTIVE"
    assert not other.keys() & HUGE_PAGES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "here"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, here: str) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    arguments = ["--model", str(model), "--rounds", "2", "--workloads", "score,decode 8", "--format", form, "--here", here]
    arguments += ["--out", str(tmp_path / "out")]
    assert against.main([str(against.HERE), *arguments]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["there"], summary["format_there"]) == (summary["machine"]["commit"], form)
    assert summary["format_here"] == here
    assert all(clock["ratio"] > 0 for workload in summary["workloads"].values() for clock in workload.values())
    assert summary["workloads"].keys() == {"score", "decode 8"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_a_checkout_without_an_engine_is_an_error(tmp_path: Path) -> None:
    process = against.start(tmp_path, tmp_path)
    with pytest.raises(ProcessEnded, match="exit code 1"):
        process.read()
    process.close()
