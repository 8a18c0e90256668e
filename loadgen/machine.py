"""Description of the machine of a run, for its records."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("yardstick-llm", "aiohttp", "uvloop")


def describe() -> dict[str, str | int | float]:
    """Return the generator's processor, cores, load, host and versions; those of the server are unknown here."""
    found: dict[str, str | int | float] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit of this checkout, marked if files differ from it; ``unknown`` outside a checkout, as in an image."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
