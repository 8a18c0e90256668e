"""The cache of items comes near to its bounds, and follows what is popular."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine import eviction


@pytest.mark.slow
def test_hit_rates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "WORKING_TOKENS", 100)
    options = {
        "items": 500,
        "item-tokens": 8,
        "common-tokens": 3,
        "query-tokens": 2,
        "per-request": 25,
        "requests": 240,
        "warm-up": 120,
        "step-tokens": 128,
    }
    assert eviction.main([text for name, value in options.items() for text in (f"--{name}", str(value))]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    steady = report["steady"]
    assert steady["LRU"] + 0.05 < steady["engine"]
    assert steady["popularity"] - 0.02 < steady["engine"] < steady["future"]
    assert steady["engine"] < steady["engine, families"] < steady["future"], "more of them fit"
    assert report["drift"]["engine"] > report["drift"]["LRU"] + 0.03
    assert report["abrupt"]["engine"] > report["abrupt"]["LRU"]
