"""Limits of cores and memory that a container sets, from cgroups, version 1 and 2, and the memory that is available.

Files and formats: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1. A limit that cannot be read does not exist.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def cores(root: Path = ROOT, of_self: Path = SELF) -> float:
    """Cores' worth of time that this process may use; infinity without a limit."""
    unified = _folder(root, of_self, "")
    quota, _, period = _text(unified / "cpu.max").partition(" ")
    if not quota:
        single = _folder(root, of_self, "cpu")
        quota, period = _text(single / "cpu.cfs_quota_us"), _text(single / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def available_memory() -> float:
    """Bytes that this process may take without swapping, files that the kernel may drop included."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(MEMINFO), re.MULTILINE)
    machine = int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, free_memory())


def free_memory(root: Path = ROOT, of_self: Path = SELF) -> float:
    """Bytes up to this process's limit, files that the kernel may drop not counted as used; infinity without a limit."""
    folder = _folder(root, of_self, "")
    limit, used, idle = _text(folder / "memory.max"), _text(folder / "memory.current"), "inactive_file"
    if not limit:
        folder = _folder(root, of_self, "memory")
        limit, used = _text(folder / "memory.limit_in_bytes"), _text(folder / "memory.usage_in_bytes")
        idle = "total_inactive_file"
    if not (limit.isdigit() and used.isdigit()):
        return math.inf
    statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    return max(0, int(limit) - int(used) + int(statistics.get(idle, 0)))


def _folder(root: Path, of_self: Path, controller: str) -> Path:
    """Folder of this process's group; in a container, whose group is mounted at the root, the root. controller: "" for the single
    hierarchy of version 2.
    """
    lines = [line.split(":", 2) for line in _text(of_self).splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    own = root / controller / paths.get(controller, "").lstrip("/")
    return own if own.is_dir() else root / controller


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
