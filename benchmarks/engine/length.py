"""The cost of length guidance beside plain generation: ``python -m benchmarks length``. The last line is JSON."""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.engine.engines import Engine
from benchmarks.engine.records import Records, add_output, describe, opened
from benchmarks.engine.writing import CANDIDATES, MIX_MIN_P, PLAIN, Writing, load_pair, mixed, step_seconds, survivors

BOUNDS = {1: 1.19, 16: 1.19, 100: 1.50, 800: 1.85}
"""The smallest possible ratio of a guided to a plain step on one H200, by rows: 7B + 1.5B, five candidates in every row. Weights
and keys are read, and products computed, at the speeds measured there."""
TARGET = 1.25
"""Target for the measured ratio, relative to :data:`BOUNDS`."""
PROMPT = 96
ROWS_SECONDS, SECONDS_A_ROW = 15.0, 0.03
"""Time that one measurement may take on a GPU, its compilations included, and more for each row."""


def main(arguments: Sequence[str]) -> int:
    """Print the table and the JSON line; returns the exit code."""
    about = "The cost of length guidance beside plain generation."
    parser = argparse.ArgumentParser("python -m benchmarks length", description=about)
    parser.add_argument("--shape", choices=("demo", "7b"), default="demo", help="the shipped models, or random 7B and 1.5B")
    parser.add_argument("--rows", type=_counts, default=(), help="texts at a time, such as 1,16,100,800 (64; these on a GPU)")
    parser.add_argument("--repeats", type=int, help="of every measurement (5)")
    parser.add_argument("--output", type=int, help="tokens a text (64; 48 on a GPU)")
    parser.add_argument("--quick", action="store_true", help="few repeats and short texts, to see that it works")
    add_output(parser)
    asked = parser.parse_args(arguments)
    records, pair = opened(asked), load_pair(asked.shape)
    on_gpu = pair.decoder.embed.weight.is_cuda
    rows = asked.rows or (tuple(BOUNDS) if on_gpu else (64,))
    output = asked.output or (24 if asked.quick else 48 if on_gpu else 64)
    # Slots for all texts, and for the prompts of the previous load, which stay cached.
    engine = pair.engine(2 * max(rows) * (PROMPT + output) + 1024, max(rows))
    writings = [Writing(count, PROMPT, output) for count in rows]
    mix, repeats = mixed(engine, writings[0]), asked.repeats or (2 if asked.quick else 5)
    found: dict[int, dict[str, float]] = {}
    for writing in writings:
        work = partial(costs, engine, writing, replace(writing, sampling=mix), repeats, records)
        if cost := records.store.measure(f"{writing.rows} rows", ROWS_SECONDS + writing.rows * SECONDS_A_ROW, work):
            found[writing.rows] = cost
    show(found, on_gpu and asked.shape == "7b", records)
    summary: dict[str, Any] = {"bench": "length", "machine": describe(), "model": asked.shape, "dtype": pair.dtype, "rows": found}
    summary |= {"engine": engine.description, "left_out": records.store.left_out}
    summary["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    records.finish(summary)
    return 0


def costs(engine: Engine, writing: Writing, mix: Writing, repeats: int, records: Records) -> dict[str, float]:
    """Measure guided and plain steps in turn, on prompts of the same lengths: guided ones with five candidates and with a survivor
    mix, plain ones as a request without options has them and with the candidates' ``top_k``."""
    rng, vocabulary = np.random.default_rng(writing.rows), engine.loop.info.vocab_size
    filtered = replace(writing, sampling=msgspec.structs.replace(PLAIN, top_k=CANDIDATES))
    loads = {"plain": (writing, False), "plain top-k": (filtered, False), "guided": (writing, True), "guided mix": (mix, True)}
    times: dict[str, list[float]] = {name: [] for name in loads}
    for place in records.progress(range(repeats + 1), f"{writing.rows} rows"):
        for name, (load, steered) in loads.items():
            seconds = step_seconds(engine, load.requests(rng, vocabulary, repeat(steered)))
            if place:  # the first round warms up
                times[name].append(seconds)
                records.rows.append({"kind": "guided step", "rows": writing.rows, "name": name, "seconds": seconds})
    ratios, filtered_ratios, mix_ratios = (
        [one / other for one, other in zip(times[name], times[base], strict=True)]
        for name, base in (("guided", "plain"), ("guided", "plain top-k"), ("guided mix", "plain"))
    )
    middle = {name.replace(" ", "_").replace("-", "_"): statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}_ms": 1000 * seconds for name, seconds in middle.items()},
        **{f"{name}_tokens_per_s": writing.rows / seconds for name, seconds in middle.items()},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "top_k_ratio": statistics.median(filtered_ratios),
        "mix_ratio": statistics.median(mix_ratios),
        "mix_candidates": survivors(engine, replace(mix, output=16), rng),
    }


def show(by_rows: dict[int, dict[str, float]], bounded: bool, records: Records) -> None:
    """Show guided and plain steps at each number of rows; ``bounded``: the published shapes on a GPU."""
    headings = ["rows", "plain, ms", "guided, ms", "plain, tokens/s", "guided, tokens/s", "guided ÷ plain", "÷ plain, top-k"]
    headings += [f"min_p {MIX_MIN_P}", "candidates there", *(["bound", "÷ bound"] if bounded else [])]
    table = Table(*headings, title=f"A step of decoding, {CANDIDATES} candidates")
    for rows, cost in by_rows.items():
        cells = [f"{rows}", *(f"{cost[f'{name}_ms']:.2f}" for name in ("plain", "guided"))]
        cells += [f"{cost[f'{name}_tokens_per_s']:.0f}" for name in ("plain", "guided")]
        cells += [f"{cost['ratio']:.2f}× ({cost['ratio_min']:.2f}–{cost['ratio_max']:.2f})", f"{cost['top_k_ratio']:.2f}×"]
        cells += [f"{cost['mix_ratio']:.2f}×", f"{cost['mix_candidates']:.1f}"]
        if bounded and rows in BOUNDS:
            cells += [f"{BOUNDS[rows]:.2f}×", f"{cost['ratio'] / BOUNDS[rows]:.2f} (target {TARGET})"]
        table.add_row(*cells)
    records.console.print(table)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) <= 0:
        raise argparse.ArgumentTypeError("rows must be greater than 0")
    return counts
