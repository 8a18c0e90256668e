"""Where and of what a measurement was taken."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """Processor, threads, versions and commit, for the record of a benchmark."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, marked where files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
