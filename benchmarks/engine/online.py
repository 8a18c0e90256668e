"""Scoring through the gateway over HTTP: Poisson arrivals, open loop, latency from the scheduled time."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.engine.records import PERCENTILES, Records, percentiles
from benchmarks.engine.servers import ServerError
from benchmarks.engine.subject import Workload
from yardstick_llm.loadgen.records import Record, parse

FRACTIONS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Fractions of the capacity to measure, if no rates are given."""
RUN_FACTOR, RUN_SECONDS = 1.5, 2.0
"""A run whose rate is above the capacity takes at most :data:`RUN_FACTOR` times the duration of its arrivals, and
:data:`RUN_SECONDS` more."""


class Online:
    """Results of all runs against one gateway."""

    def __init__(self, url: str, vocab_size: int, records: Records, workload: Workload) -> None:
        self._url = url
        self._vocab_size = vocab_size
        self._records = records
        self._runs = 0
        self._workload, self._items = workload, workload.items

    def measure(self, rates: Sequence[float], seconds: float, burst: int = 16, alone: int = 10) -> dict[str, Any]:
        """Measure the capacity with ``burst`` requests at once, then ``alone`` single requests, then each of ``rates``.

        ``rates``: items a second; if empty, :data:`FRACTIONS` of the capacity. ``seconds``: how long requests arrive at each rate.
        Raises :class:`ServerError`.
        """
        warm_up = self._run("warm-up", [0.0] * 4)
        if warm_up["failures"]:
            raise ServerError(f"requests to {self._url} failed: {warm_up['failures']}")
        measure = self._records.store.measure
        capacity = measure("burst", 0, lambda: self._run("burst", [0.0] * burst))["items_per_s"]
        gap = 3 * self._items / capacity
        singles = [gap * place for place in range(alone)]
        single = measure("alone", gap * alone, lambda: self._run("alone", singles))
        needed = RUN_FACTOR * seconds + RUN_SECONDS
        wanted = rates or [fraction * capacity for fraction in FRACTIONS]
        runs = [measure(f"rate {rate:g}", needed, partial(self._poisson, rate, seconds)) for rate in wanted]
        by_rate = sorted(filter(None, runs), key=itemgetter("items_per_s_offered"))
        return {"capacity_items_per_s": capacity, "alone": single or {}, "rates": by_rate}

    def _poisson(self, rate: float, seconds: float) -> dict[str, Any]:
        """``rate``: items a second."""
        count = max(1, round(rate * seconds / self._items))
        gaps = np.random.default_rng(self._runs).exponential(self._items / rate, count)
        return {"items_per_s_offered": rate} | self._run("rate", gaps.cumsum().tolist())

    def _run(self, kind: str, arrivals: list[float]) -> dict[str, Any]:
        self._runs += 1
        records = drive(self._url, arrivals, self._workload, self._vocab_size, self._runs)
        run = {"kind": f"online {kind}", "run": self._runs}
        self._records.rows += [run | msgspec.to_builtins(record) for record in records]
        good = [record for record in records if record.failure is None]
        failures = Counter(f"status {record.status}" if record.failure == "status" else record.failure for record in records)
        failures.pop(None, None)
        return {
            "requests": len(records),
            "failures": dict(sorted(failures.items())),
            "items_per_s": sum(record.items for record in good) / max(record.end for record in records),
            "client_late_ms": 1000 * max(record.lag for record in records),
            "growth_ms": 1000 * growth([record.latency for record in good]),
            **{f"{name}_ms": value for name, value in percentiles([1000 * record.latency for record in good]).items()},
        }


def growth(latencies: Sequence[float]) -> float:
    """Return by how much the median latency of the last quarter of the requests exceeds that of the first. A rate above the
    capacity shows here first: the queue grows for as long as requests arrive, whatever the percentiles of a short run are."""
    quarter = max(1, len(latencies) // 4)
    return statistics.median(latencies[-quarter:]) - statistics.median(latencies[:quarter]) if latencies else 0.0


def drive(url: str, arrivals: list[float], workload: Workload, vocab_size: int, seed: int) -> list[Record]:
    """Send requests with the load generator, a process of its own, at these times in seconds; the first starts the run."""
    with tempfile.TemporaryDirectory() as folder:
        times, out = Path(folder, "times"), Path(folder, "run")
        times.write_text("\n".join(map(repr, arrivals)))
        settings = {
            "arrivals.kind": "trace",
            "arrivals.file": times,
            "duration_s": arrivals[-1] + 1,
            "seed": seed,
            "target.cache": "false",
            "target.timeout_s": 120,
            "workloads[0].query_length": workload.query,
            "workloads[0].item_length": workload.item,
            "workloads[0].items": workload.items,
            "workloads[0].vocab_size": vocab_size,
        }
        command = [sys.executable, "-m", "yardstick_llm.loadgen", "run", "--url", url, "--out", str(out)]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own modules
        if done.returncode:
            raise ServerError(f"the load generator failed: {done.stderr.strip()[-500:]}")
        (run,) = parse((out / "records.jsonl").read_bytes().splitlines(), str(out))
    return run.records


def show(results: Mapping[str, Any], records: Records) -> None:
    """Show the table."""
    capacity, runs = f"capacity: {results['capacity_items_per_s']:.1f} items/s in a burst", results["rates"]
    records.console.print(f"{capacity}; one request alone: {_number(results['alone'], 'p50_ms')} ms at the median")
    table = Table(title="Through the gateway, Poisson arrivals, result cache off")
    for heading in ("offered", "items/s", *(f"P{share} ms" for share in PERCENTILES), "growth ms", "sent", "failed", "late ms"):
        table.add_column(heading, justify="right")
    for run in runs:
        names = "items_per_s_offered", "items_per_s", *(f"p{percent}_ms" for percent in PERCENTILES), "growth_ms"
        failures = ", ".join(f"{count} × {kind}" for kind, count in run["failures"].items()) or "0"
        table.add_row(*(_number(run, name) for name in names), str(run["requests"]), failures, _number(run, "client_late_ms"))
    records.console.print(table)


def _number(run: Mapping[str, Any], name: str) -> str:
    """Format a time; – if no request of the run succeeded."""
    return f"{run[name]:.1f}" if name in run else "–"
