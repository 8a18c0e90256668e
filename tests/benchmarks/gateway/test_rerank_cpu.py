"""The benchmark of reranking through the gateway, with few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.slow
def test_it_measures_this_checkout_and_another(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).parents[3])
    assert main(["rerank-cpu", "--requests", "4", "--rounds", "1", "--against", here]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < summary["gateway, 1 short, CPU"] < summary["gateway, 20 long, CPU"]
    assert summary["ratios"]["gateway / other checkout, 5 short, CPU"] > 0
