"""Engines that share a machine divide its memory and its cores. The threads are in tests/engine/test_cgroup.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.loop.build import build_loop
from engine.runner import machine as cgroup
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint

MIB = 1 << 20


def test_the_slots_of_all_engines_take_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "tiny", "qwen3"))
    monkeypatch.setattr(cgroup, "available_memory", lambda: float(64 * MIB))

    def slots(**settings: int) -> int:
        return build_loop(EngineSettings(model=checkpoint, name="t", **settings)).info.limits.max_slots

    alone = slots()
    assert 4096 < alone < 131_072, "memory decides, and not the most or the fewest slots"
    assert [slots(machine_engines=count) for count in (2, 4)] == [alone // 2, alone // 4]
    assert slots(machine_engines=2, max_total_tokens=5000) == 5000
