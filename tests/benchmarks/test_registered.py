"""The benchmark of registered items, with few requests."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


@pytest.mark.slow
def test_it_measures_both_stores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registered", "--requests", "2", "--rounds", "1"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    for store in ("memory", "Redis"):
        assert 0 < summary[f"{store}, 1 ids"] < summary[f"{store}, 100 ids"]
