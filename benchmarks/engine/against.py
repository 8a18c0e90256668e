"""Scoring and decoding on a CPU in float32, beside the engine of another checkout: ``python -m benchmarks against CHECKOUT``.

Each checkout has a process with the same weights and threads, and the variables that its own engine sets. They compute the same
requests in turn, in alternating order, and must agree. Figures are medians of the rounds; ratios are the other's time divided by
ours, medians of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.engine import machine
from benchmarks.engine.against_process import FORMATS, WORKLOADS
from benchmarks.engine.line_process import LineProcess
from benchmarks.engine.records import Records
from benchmarks.engine.subject import SHAPES, subject
from engine.serving.environment import HUGE_PAGES, with_defaults

HERE = Path(__file__).resolve().parents[2]
OURS, THEIRS = "here", "there"
CLOCKS = ("wall", "cpu")
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "int8": 1.0, "bfloat16-int8": 1.0}
"""Largest difference of a log-probability from float32, with random weights, by number format."""

ENVIRONMENT = "engine/serving/environment.py"
"""The file of a checkout that has its engine's variables."""
PRINT_VARIABLES = (
    "import json, os; from engine.serving.environment import with_defaults; print(json.dumps(with_defaults(os.environ)))"
)

Times = dict[str, dict[str, list[float]]]
"""Checkout, clock, and seconds of each round."""


def variables_of(checkout: Path) -> dict[str, str]:
    """Variables that the checkout's engine sets for its loop. A checkout older than the file gets ours without huge pages."""
    ours = with_defaults({})
    outside = {name: value for name, value in os.environ.items() if ours.get(name) != value} | {"PYTHONPATH": str(checkout)}
    if not (checkout / ENVIRONMENT).exists():
        return {name: value for name, value in with_defaults(outside).items() if name not in HUGE_PAGES or name in outside}
    command = [sys.executable, "-c", PRINT_VARIABLES]
    found = subprocess.run(command, cwd=checkout, env=outside, capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def start(checkout: Path, model: Path, form: str = "float32") -> LineProcess:
    """The engine of a checkout, which prints a line when the model is loaded."""
    program = str(Path(__file__).with_name("against_process.py"))
    command = [sys.executable, program, str(model), str(torch.get_num_threads()), form]
    return LineProcess(command, checkout, variables_of(checkout))


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks against", description="Beside the engine of another checkout, on a CPU.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the other checkout")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="(%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of random weights (%(default)s)")
    parser.add_argument("--model", help="a model directory, instead of random weights")
    parser.add_argument("--format", choices=FORMATS, default="float32", help="number format of the other engine (%(default)s)")
    parser.add_argument("--here", choices=FORMATS, default="float32", help="number format of this engine (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the table, the records and the summary")
    options = parser.parse_args(arguments)
    tolerance = TOLERANCES[options.here] + TOLERANCES[options.format]
    records, times = Records(), {}
    with subject(options.shape, options.model, "float32") as measured, ExitStack() as stack:
        model = measured.directory.resolve()
        checkouts = {OURS: start(HERE, model, options.here), THEIRS: start(options.checkout.resolve(), model, options.format)}
        for checkout in checkouts.values():
            stack.callback(checkout.close)
        for checkout in checkouts.values():
            checkout.read()
        for name in options.workloads.split(","):
            times[name] = measure(checkouts, name, options.rounds, records, tolerance)
    summary = {
        "bench": "against",
        "machine": machine.describe(),
        "there": machine.commit(options.checkout),
        "format_here": options.here,
        "format_there": options.format,
        "model": options.model or options.shape,
        "rounds": options.rounds,
        "workloads": {name: summary_of(found) for name, found in times.items()},
    }
    show(summary, records)
    if options.out is not None:
        records.write(options.out, summary)
    print(json.dumps(summary), flush=True)
    return 0


def measure(checkouts: Mapping[str, LineProcess], workload: str, rounds: int, records: Records, tolerance: float) -> Times:
    """Run a workload ``rounds`` times in each checkout, after a round that is not counted."""
    times: Times = {name: {clock: [] for clock in CLOCKS} for name in checkouts}
    for place in records.progress(range(rounds + 1), workload):
        order = sorted(checkouts, reverse=bool(place % 2))
        answers = {name: checkouts[name].ask([workload, place]) for name in order}
        check_agreement(workload, *(answers[name]["found"] for name in checkouts), tolerance=tolerance)
        for name, answer in answers.items() if place else ():
            for clock in CLOCKS:
                times[name][clock].append(answer[clock])
            records.rows.append({"kind": workload, "name": name, **{clock: answer[clock] for clock in CLOCKS}})
    return times


def check_agreement(workload: str, ours: list[list[float]], theirs: list[list[float]], *, tolerance: float) -> None:
    """Both have the same scores, or texts of the same lengths, whose tokens may differ after a near tie."""
    if workload == "score":
        assert np.abs(np.array(ours) - np.array(theirs)).max() < tolerance, "the scores differ"
    assert [len(row) for row in ours] == [len(row) for row in theirs], "the outputs differ in length"


def summary_of(times: Times) -> dict[str, dict[str, float]]:
    """Medians of each clock, and the ratios of the pairs."""
    summary = {}
    for clock in CLOCKS:
        ours, theirs = times[OURS][clock], times[THEIRS][clock]
        found = [other / own for own, other in zip(ours, theirs, strict=True)]
        middle = {"here_ms": 1e3 * statistics.median(ours), "there_ms": 1e3 * statistics.median(theirs)}
        summary[clock] = middle | {"ratio": statistics.median(found), "least": min(found), "most": max(found)}
    return summary


def show(summary: Mapping[str, Any], records: Records) -> None:
    """Print the table."""
    title = f"{summary['format_here']}, beside commit {summary['there']} in {summary['format_there']}"
    table = Table("workload", "clock", "ms here", "ms there", "there / here", title=title)
    for name, clocks in summary["workloads"].items():
        for clock, found in clocks.items():
            spread = f"{found['ratio']:.2f} ({found['least']:.2f}–{found['most']:.2f})"
            table.add_row(name, clock, f"{found['here_ms']:.0f}", f"{found['there_ms']:.0f}", spread)
    records.console.print(table)
