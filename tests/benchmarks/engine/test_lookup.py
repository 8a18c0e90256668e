"""The benchmark of prompt lookup, of a few tokens, and what the docs and the engine take from its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import lookup, subject
from engine.settings import CPU_DRAFT_ROWS

TINY = replace(subject.SMALL, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=1)
DOCS = Path(__file__).parents[3] / "docs"
RECORD = DOCS / "benchmarks" / "cpu-2026-11-25-lookup"


def test_it_records_outputs_batches_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(lookup.SHAPES, "small", TINY)
    outputs = ["--outputs", "copy", "free", "--batches", "1", "3", "--rows", "2", "64"]
    assert lookup.main([*outputs, "--tokens", "20", "--prompt", "9", "--rounds", "2", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert printed == summary
    cases = {(case["output"], case["batch"], case["rows"]): case for case in summary["rows"]}
    assert len(cases) == 8
    assert all(len(case["ratios"]) == 2 for case in cases.values())
    assert cases["copy", 1, 64]["accepted"] == 1.0
    assert cases["copy", 3, 64]["drafted"] > cases["copy", 3, 2]["drafted"] == 0  # three sequences are above the limit
    assert cases["free", 1, 64]["drafted"] <= 4
    assert set(summary["means"]) == {"2", "64"}
    table = (tmp_path / "tables.txt").read_text(encoding="utf-8").splitlines()
    assert table[0] == "| output | batch | 2 rows | 64 rows |"
    assert table[3].startswith("| copy | 3 | ")
    assert "(no drafts)" in table[3]


def test_the_default_is_the_largest_limit_without_a_loss() -> None:
    cases = json.loads((RECORD / "summary.json").read_text(encoding="utf-8"))["rows"]
    worst = {limit: min(case["ratio"] for case in cases if case["rows"] == limit) for limit in {case["rows"] for case in cases}}
    assert max(limit for limit, ratio in worst.items() if ratio > 0.95) == CPU_DRAFT_ROWS


def test_the_document_shows_the_record() -> None:
    cases = json.loads((RECORD / "summary.json").read_text(encoding="utf-8"))["rows"]
    table = lookup.tables(cases)
    assert (RECORD / "tables.txt").read_text(encoding="utf-8") == table + "\n"
    assert table in (DOCS / "prompt-lookup.md").read_text(encoding="utf-8")
