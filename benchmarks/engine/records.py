"""Output of a benchmark: results that are on disk once they are measured, tables, one line of JSON, and the machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

FILE = "results.jsonl"
RECORDS = "records.jsonl"
"""Raw measurements."""
PERCENTILES = (50, 90, 99)
FILE_WIDTH = 110
"""Columns of text if there is no terminal."""
PACKAGES = ("transformers", "triton", "flashinfer-python")
"""Packages whose versions are recorded if they are installed."""
COMMIT = "BENCH_COMMIT"
"""Variable that names the commit of a copy of the files without their repository."""
UNKNOWN = "unknown"


class Store:
    """Measured results by key. Without a folder they are kept in memory only."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        resume: bool = False,
        limit: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``resume``: take the results that are in the folder; otherwise they are removed. ``limit``: seconds from now."""
        self.folder = folder
        self.stored: Callable[[], None] = lambda: None
        """Called after a result is stored."""
        self.results: dict[str, Any] = {}
        self.left_out: list[str] = []
        """Keys for which there was no time."""
        self._clock = clock
        self._end = clock() + limit
        self._path = None if folder is None else folder / FILE
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            whole_lines(folder / RECORDS, keep=resume)
            for line in whole_lines(folder / FILE, keep=resume):
                entry = json.loads(line)
                self.results[entry["key"]] = entry["result"]

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - self._clock()

    def measure(self, key: str, seconds: float, work: Callable[[], Any]) -> Any:
        """The stored result of ``key``, or else that of ``work``, which is stored. None, and no call, if less than ``seconds`` are
        left. A result is of JSON's types and not None."""
        if key in self.results:
            return self.results[key]
        if self.left < seconds:
            self.left_out.append(key)
            return None
        result = work()
        assert result is not None, key
        self.results[key] = result
        if self._path is not None:
            append(self._path, [{"key": key, "result": result}])
        self.stored()
        return result


def whole_lines(path: Path, *, keep: bool) -> list[bytes]:
    """The lines of a file, which loses a last one that its writer did not complete. Without ``keep`` it loses all of them."""
    content = path.read_bytes() if keep and path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    replace(path, whole)
    return whole.splitlines()


def append(path: Path, rows: Sequence[Any]) -> None:
    """Add rows to a file of JSON lines; they are on disk then."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or as it was before."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class Records:
    """Collects raw measurements and tables; :meth:`write` puts them into a folder."""

    def __init__(self, store: Store | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        """Raw measurements."""
        self.store = store or Store()
        self.store.stored = self._save_rows
        self._saved = 0
        self.wrong: list[str] = []
        """Names of the scorers whose scores differed from those of the engine."""
        self.console = Console(record=True, highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
        self._progress = Console(stderr=True)

    def progress(self, steps: range, what: str) -> Iterable[int]:
        """Yield ``steps`` and show a progress bar."""
        return track(steps, what, console=self._progress, transient=True)

    def timed(self, kind: str, name: str, work: Callable[[], object]) -> float:
        """Run ``work``; store and return its seconds."""
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        self.rows.append({"kind": kind, "name": name, "seconds": taken})
        return taken

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print ``summary`` as the last line. Into the folder, if there is one, write ``tables.txt``, ``summary.json``, and what
        ``records.jsonl`` lacks."""
        self._save_rows()
        if (folder := self.store.folder) is not None:
            tables = "\n".join(line.rstrip() for line in self.console.export_text().splitlines())
            replace(folder / "tables.txt", (tables + "\n").encode())
            replace(folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        print(json.dumps(summary), flush=True)

    def _save_rows(self) -> None:
        if self.store.folder is not None:
            append(self.store.folder / RECORDS, self.rows[self._saved :])
            self._saved = len(self.rows)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return ``p50``, ``p90`` and ``p99`` of measured values; each is one of the values (inverted distribution function)."""
    return {f"p{share}": float(np.percentile(values, share, method="inverted_cdf")) for share in PERCENTILES if values}


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`opened`."""
    parser.add_argument("--out", type=Path, help="folder for results, raw records, tables and summary")
    parser.add_argument("--continue", dest="resume", action="store_true", help="measure only what the results in --out lack")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing more is measured")


def opened(asked: argparse.Namespace) -> Records:
    """Return the records of a benchmark with the options of :func:`add_output`."""
    return Records(Store(asked.out, resume=asked.resume, limit=asked.limit))


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
