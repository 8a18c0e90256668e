"""Benchmarks with few repeats."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_measurements_of_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of the machine, to which figures are related, are the best of two repeats; more take up to seven seconds."""
    monkeypatch.setattr("benchmarks.engine.roofline.REPEAT_SECONDS", 0.0)
