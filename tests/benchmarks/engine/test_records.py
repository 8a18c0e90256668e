"""The description of the machine and the software of a measurement."""

from __future__ import annotations

import pytest

from benchmarks.engine import records


def test_a_commit_that_is_named_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files may have no repository, or one of another commit."""
    monkeypatch.setenv(records.COMMIT, "abc1234")
    assert records.describe()["commit"] == "abc1234"
    monkeypatch.delenv(records.COMMIT)
    assert records.describe()["commit"] != "abc1234"
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert records.describe()["commit"] == records.UNKNOWN
