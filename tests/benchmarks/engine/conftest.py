"""Fixtures for benchmarks of the engine."""

from __future__ import annotations

import pytest

import benchmarks.__main__


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in the process of the tests, which saves imports; otherwise they restart it with an engine's variables."""
    monkeypatch.setattr(benchmarks.__main__, "_restart_as_engine", lambda *_: None)
