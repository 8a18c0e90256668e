"""Description of the machine and the software of a measurement."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("transformers", "triton", "flashinfer-python")
"""Packages whose versions are recorded if they are installed."""
COMMIT = "BENCH_COMMIT"
"""Variable that names the commit of a copy of the files without their repository."""
UNKNOWN = "unknown"


def describe() -> dict[str, str | int | float]:
    """Return processor, load, threads, GPU, driver, versions and commit, for the record of a benchmark."""
    found: dict[str, str | int | float] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": os.environ.get(COMMIT) or commit(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | (_gpu() if torch.cuda.is_available() else {})


def commit(checkout: Path = Path(__file__).parent) -> str:
    """Return the commit of a checkout, this one by default, with a mark if files differ from it."""
    return _said("git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*")


def _gpu() -> dict[str, str | int | float]:
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda or UNKNOWN}


def _said(*command: str) -> str:
    """Return the output of a program, or ``unknown`` if it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return UNKNOWN
    result = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)  # noqa: S603
    return result.stdout.strip() if result.returncode == 0 else UNKNOWN


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
