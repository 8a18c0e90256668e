"""Output of a benchmark: every measurement, the tables, the plot, and one line of JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.engine.engines import seconds
from benchmarks.engine.store import RECORDS, Store, append, replace

PERCENTILES = (50, 90, 99)
FILE_WIDTH = 110
"""Columns of text if there is no terminal."""


class Records:
    """Collects raw measurements and tables; :meth:`write` puts them into a folder."""

    def __init__(self, store: Store | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
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
        taken = seconds(work)
        self.rows.append({"kind": kind, "name": name, "seconds": taken})
        return taken

    def write(self, folder: Path, summary: Mapping[str, Any]) -> None:
        """Write ``tables.txt``, ``summary.json``, and what ``records.jsonl`` lacks: all rows, unless the store has the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.store.folder is None:
            replace(folder / RECORDS, b"")
            append(folder / RECORDS, self.rows)
        self._save_rows()
        tables = "\n".join(line.rstrip() for line in self.console.export_text().splitlines())
        replace(folder / "tables.txt", (tables + "\n").encode())
        replace(folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def _save_rows(self) -> None:
        if self.store.folder is not None:
            append(self.store.folder / RECORDS, self.rows[self._saved :])
            self._saved = len(self.rows)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return ``p50``, ``p90`` and ``p99`` of measured values; each is one of the values (inverted distribution function)."""
    return {f"p{share}": float(np.percentile(values, share, method="inverted_cdf")) for share in PERCENTILES if values}


def plot(folder: Path, runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write ``latency.png`` and ``latency.svg``, where matplotlib is installed: percentiles of latency against the offered items a
    second."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    answered = [run for run in runs if "p50_ms" in run]
    offered = [run["items_per_s_offered"] for run in answered]
    for share in PERCENTILES:
        axes.plot(offered, [run[f"p{share}_ms"] for run in answered], marker="o", label=f"P{share}")
    axes.set(xlabel="items a second, offered", ylabel="latency, ms", yscale="log", title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    for kind in ("png", "svg"):
        figure.savefig(folder / f"latency.{kind}", dpi=150, metadata={"Date": None} if kind == "svg" else None)
