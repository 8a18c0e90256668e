"""The description of the machine and the software of a measurement."""

from __future__ import annotations

import pytest

from benchmarks.engine import machine


def test_a_commit_that_is_named_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files may have no repository, or one of another commit."""
    monkeypatch.setenv(machine.COMMIT, "abc1234")
    assert machine.describe()["commit"] == "abc1234"
    monkeypatch.delenv(machine.COMMIT)
    assert machine.describe()["commit"] != "abc1234"
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert machine.describe()["commit"] == machine.UNKNOWN
