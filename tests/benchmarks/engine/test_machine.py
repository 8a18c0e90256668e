"""The description of the machine and the software of a measurement."""

from __future__ import annotations

import pytest

from benchmarks.engine import machine


def test_a_copy_without_its_repository_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that is there knows better."""
    known = machine.describe()["commit"]
    monkeypatch.setenv(machine.COMMIT, "abc1234")
    assert machine.describe()["commit"] == (known if known != machine.UNKNOWN else "abc1234")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert machine.describe()["commit"] == "abc1234"
    monkeypatch.delenv(machine.COMMIT)
    assert machine.describe()["commit"] == machine.UNKNOWN
