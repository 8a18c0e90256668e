"""The benchmarks of catalogues run, and their figures are plausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main as main_command
from benchmarks.engine.catalogue import main


@pytest.mark.slow
def test_cached_items_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--items 12 --per-request 6 --item-tokens 60 --query-tokens 4 --rounds 1"
    assert main(sizes.split()) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["all cached, ratio"] > 1
    assert report["none cached, ratio"] < report["all cached, ratio"]


@pytest.mark.parametrize("form", [["--dtype", "bfloat16"], ["--quantize", "fp8"]])
def test_many_requests_name_known_items(
    form: list[str], tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--shape tiny --items 12 --per-request 6 --item-tokens 30 --query-tokens 4 --rounds 2 --in-flight 5"
    command = ["catalogue", *sizes.split(), *form, "--out", str(tmp_path)]
    assert main_command([*command, "--limit", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == ["round 0"]
    assert main_command([*command, "--continue"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rounds = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rates = [1 / each["result"]["all cached"] for each in rounds]
    assert report["all cached, items/s"] == pytest.approx(sum(rates) / 2, abs=0.1)
