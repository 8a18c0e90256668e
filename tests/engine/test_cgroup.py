"""Limits as the kernel's files tell them, in both versions' places and a container's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine.loop.build import set_threads
from engine.runner import machine as cgroup
from engine.settings import EngineSettings

GIB = 1 << 30
VERSION_2 = {"cpu.max": "150000 100000\n", "memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n"}
VERSION_2_STAT = {"memory.stat": f"anon 5\ninactive_file {GIB}\nfile 7\n"}
VERSION_1 = {
    "cpu/{}cpu.cfs_quota_us": "150000\n",
    "cpu/{}cpu.cfs_period_us": "100000\n",
    "memory/{}memory.limit_in_bytes": f"{4 * GIB}\n",
    "memory/{}memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/{}memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def of_self(tmp_path: Path) -> Path:
    return tmp_path / "self"


LAYOUTS = {
    "version 2, in a group": ("0::/kube/pod\n", {f"kube/pod/{name}": text for name, text in (VERSION_2 | VERSION_2_STAT).items()}),
    "version 2, in a container": ("0::/\n", VERSION_2 | VERSION_2_STAT),
    "version 2, a path from outside the container": ("0::/../other\n", VERSION_2 | VERSION_2_STAT),
    "version 1, in a group": (
        "4:memory:/kube/pod\n2:cpu,cpuacct:/kube/pod\n",
        {name.format("kube/pod/"): text for name, text in VERSION_1.items()},
    ),
    "version 1, in a container": (
        "4:memory:/kube/pod\n1:cpu:/kube/pod\n0::/\n",
        {name.format(""): text for name, text in VERSION_1.items()},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limits_are_found(layout: str, tmp_path: Path, of_self: Path) -> None:
    groups, files = LAYOUTS[layout]
    of_self.write_text(groups)
    write(tmp_path / "cgroup", files)
    assert cgroup.cores(tmp_path / "cgroup", of_self) == 1.5
    assert cgroup.free_memory(tmp_path / "cgroup", of_self) == 2 * GIB


UNLIMITED = {
    "version 2": {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"},
    "version 1": {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
    "nothing": {},
}


@pytest.mark.parametrize("files", UNLIMITED)
def test_where_there_is_no_limit(files: str, tmp_path: Path, of_self: Path) -> None:
    of_self.write_text("0::/\n")
    write(tmp_path / "cgroup", UNLIMITED[files])
    assert cgroup.cores(tmp_path / "cgroup", of_self) == math.inf
    assert cgroup.free_memory(tmp_path / "cgroup", of_self) == math.inf


@pytest.mark.parametrize(
    ("cores", "settings", "threads"),
    [
        (1.5, {}, 2),
        (0.2, {}, 1),
        (1.5, {"threads": 3}, 3),
        (2, {"tensor_parallel": 2}, 1),
        (4, {"machine_engines": 2}, 2),
        (4, {"machine_engines": 2, "tensor_parallel": 2}, 1),
        (4, {"machine_engines": 8}, 1),
        (4, {"machine_engines": 2, "threads": 3}, 3),
    ],
)
def test_threads_are_as_many_as_may_run(
    monkeypatch: pytest.MonkeyPatch, cores: float, settings: dict[str, int], threads: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cgroup, "cores", lambda: cores)
    try:
        torch.set_num_threads(4)
        set_threads(EngineSettings(model="x", name="x", **settings))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
