"""``python -m benchmarks length``: measures the cost and the effect of length guidance; the last line is JSON."""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.table import Table

from benchmarks.engine import length_plot, machine
from benchmarks.engine.engines import describe_loop
from benchmarks.engine.records import Records
from benchmarks.engine.stages import Stages
from benchmarks.engine.store import Store
from benchmarks.engine.subject import QWEN25_7B, QWEN25_15B, default_device
from benchmarks.engine.writers import (
    CANDIDATES,
    MIX_MIN_P,
    PLAIN,
    Writer,
    Writing,
    guided_flops_ratio,
    mixed,
    random_pair,
    survivors,
)
from engine.build import PairedLenVM
from engine.demo import MODELS
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lenvm import load_lenvm
from engine.models.loader import load_model
from examples.demo_models.lenvm import GAMMA

PUBLISHED = {"first timing study": 4.55, "optimised": 4.03}
"""Guided / plain wall time on one H100, 7B + 1.5B, GSM8K, 50 questions × 16 samples, top_k 5, min_p 0.01 (arXiv 2604.27039)."""
BOUNDS = {1: 1.19, 16: 1.19, 100: 1.50, 800: 1.85}
"""The smallest possible ratio of a guided to a plain step on one H200, by rows: 7B + 1.5B, five candidates in every row. Weights
and keys are read, and products computed, at the speeds measured there."""
TARGETS = {"cpu": 1.15, "cuda": 1.25}
"""Targets for the measured ratio, relative to the ratio of FLOPs (CPU) and to the bounds (GPU)."""
ROWS_SECONDS, SECONDS_A_ROW, STAGES_SECONDS = 15.0, 0.03, 6.0
"""Time that one measurement may take on a GPU, its compilations included, and more for each row."""
BESIDE_ROWS = 64
"""Numbers of plain rows and of guided rows in one step."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    shape: str = "demo"
    """``demo``: the shipped models; ``7b``: random weights in the published shapes."""
    rows: tuple[int, ...] = ()
    """Numbers of texts at a time; empty: 64, or on a GPU those of :data:`BOUNDS`."""
    repeats: int = 5
    output: int = 0
    """Tokens per text; 0: 64, or 48 on a GPU."""
    texts: int = 128
    """Number of texts of each scale, for the distributions."""
    distributions: bool = True
    out: Path | None = None
    resume: bool = False
    limit: float = math.inf
    """See :class:`benchmarks.engine.score.Options`."""


@dataclass(frozen=True)
class Pair:
    """The two measured models."""

    decoder: Decoder
    length: PairedLenVM | None
    """None if no text is guided."""
    dtype: str

    @property
    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """Configurations of the base model and of the length model."""
        assert self.length is not None
        return self.decoder.config, self.length.model.config

    def writer(self, slots: int | None, rows: int) -> Writer:
        """Return an engine with both models for ``rows`` texts at a time."""
        return Writer(self.decoder, self.length, self.dtype, slots=slots, rows=rows)


def load_pair(shape: str) -> Pair:
    """Load both models, on a GPU if there is one."""
    device = default_device()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    if shape == "7b":
        return Pair(*random_pair(QWEN25_7B, QWEN25_15B, device, getattr(torch, dtype)), dtype)
    decoder = load_model(MODELS / "base", getattr(torch, dtype)).to(device).eval()
    model = load_lenvm(MODELS / "lenvm", getattr(torch, dtype)).to(device).eval()
    return Pair(decoder, PairedLenVM(model, GAMMA), dtype)


def run(options: Options) -> None:
    """Print the tables and the JSON line; with ``out``, write a folder."""
    records = Records(Store(options.out, resume=options.resume, limit=options.limit))
    pair, measure = load_pair(options.shape), records.store.measure
    on_gpu = pair.decoder.embed.weight.is_cuda
    rows = options.rows or (tuple(BOUNDS) if on_gpu else (64,))
    output = options.output or (48 if on_gpu else 64)
    summary: dict[str, Any] = {"bench": "length", "machine": machine.describe(), "model": options.shape, "dtype": pair.dtype}
    writings = [Writing(count, 96, output) for count in rows]
    most = max(2 * min(rows[-1], BESIDE_ROWS), *rows)
    writer = pair.writer(_slots(replace(writings[-1], rows=most)), most)
    mix = mixed(writer, writings[0])
    by_rows = {
        writing.rows: measure(
            f"{writing.rows} rows",
            ROWS_SECONDS + writing.rows * SECONDS_A_ROW,
            partial(costs, pair, writer, writing, replace(writing, sampling=mix), options.repeats, records),
        )
        for writing in writings
    }
    summary["rows"] = {count: cost for count, cost in by_rows.items() if cost}
    show_costs(summary["rows"], on_gpu and options.shape == "7b", records)
    small = replace(writings[-1], rows=min(rows[-1], 100))
    summary["stages_ms"] = measure("stages", STAGES_SECONDS, partial(stages, writer, small, records))
    both = replace(writings[-1], rows=min(rows[-1], BESIDE_ROWS))
    summary["beside"] = measure("beside", ROWS_SECONDS, partial(beside, writer, both, options.repeats, records))
    if options.distributions and options.shape == "demo":
        lengths = length_plot.by_scale(writer, options.texts, records)
        length_plot.show(lengths, records)
        summary["mean_tokens_by_scale"] = {scale: found.mean for scale, found in lengths.items()}
    summary |= {"engine": describe_loop(writer.loop), "left_out": records.store.left_out}
    summary["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    if options.out is not None:
        records.write(options.out, summary)
        if options.distributions and options.shape == "demo":
            length_plot.plot(options.out, lengths)
    print(json.dumps(summary), flush=True)


def _slots(writing: Writing) -> int:
    """Slots for all texts, and for the prompts of the previous load, which stay cached."""
    return 2 * writing.rows * (writing.prompt + writing.output) + 1024


def costs(pair: Pair, writer: Writer, writing: Writing, mix: Writing, repeats: int, records: Records) -> dict[str, float]:
    """Measure guided and plain steps in turn, on prompts of the same lengths: guided ones with five candidates and with a survivor
    mix, plain ones as a request without options has them and with the candidates' ``top_k``."""
    rng = np.random.default_rng(writing.rows)
    filtered = replace(writing, sampling=msgspec.structs.replace(PLAIN, top_k=CANDIDATES))
    loads = {"plain": (writing, False), "plain top-k": (filtered, False), "guided": (writing, True), "guided mix": (mix, True)}
    times: dict[str, list[float]] = {name: [] for name in loads}
    for place in records.progress(range(repeats + 1), f"{writing.rows} rows"):
        for name, (load, steered) in loads.items():
            seconds = writer.step_seconds(load.requests(rng, writer.vocab_size, repeat(steered)))
            if place:  # the first round warms up
                times[name].append(seconds)
                records.rows.append({"kind": "guided step", "rows": writing.rows, "name": name, "seconds": seconds})
    ratios, filtered_ratios, mix_ratios = (
        [one / other for one, other in zip(times[name], times[base], strict=True)]
        for name, base in (("guided", "plain"), ("guided", "plain top-k"), ("guided mix", "plain"))
    )
    flops = guided_flops_ratio(*pair.configs, writing.prompt + writing.output / 2)
    middle = {name.replace(" ", "_").replace("-", "_"): statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}_ms": 1000 * seconds for name, seconds in middle.items()},
        **{f"{name}_tokens_per_s": writing.rows / seconds for name, seconds in middle.items()},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "top_k_ratio": statistics.median(filtered_ratios),
        "flops_ratio": flops,
        "over_flops_ratio": statistics.median(ratios) / flops,
        "mix_ratio": statistics.median(mix_ratios),
        "mix_candidates": survivors(writer, replace(mix, output=16), rng),
    }


def beside(writer: Writer, writing: Writing, repeats: int, records: Records) -> dict[str, float]:
    """Compare the time that plain rows add to a step of guided rows with the time that they add to a step of plain rows."""
    rng, rows = np.random.default_rng(7), writing.rows
    double = replace(writing, rows=2 * rows)
    loads = {
        "guided": (writing, [True] * rows),
        "plain": (writing, [False] * rows),
        "guided and plain": (double, [True, False] * rows),
        "plain and plain": (double, [False] * 2 * rows),
    }
    times: dict[str, list[float]] = {name: [] for name in loads}
    for place in records.progress(range(repeats + 1), "plain rows beside guided ones"):
        for name, (load, steered) in loads.items():
            seconds = writer.step_seconds(load.requests(rng, writer.vocab_size, steered))
            if place:
                times[name].append(seconds)
                records.rows.append({"kind": "beside", "name": name, "seconds": seconds})
    rounds = zip(*(times[name] for name in ("guided", "plain", "guided and plain", "plain and plain")), strict=True)
    excess = statistics.median(both / (guided + doubled - plain) - 1 for guided, plain, both, doubled in rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    taken = 1000 * middle["guided and plain"]
    records.console.print(f"{rows} plain and {rows} guided rows: {taken:.2f} ms a step, {excess:+.1%} over what both cost alone")
    return {**{f"{name.replace(' ', '_')}_ms": 1000 * value for name, value in middle.items()}, "excess": excess}


def stages(writer: Writer, writing: Writing, records: Records) -> dict[str, float]:
    """Return the milliseconds of a guided step by stage."""
    taken = Stages(gpu=next(iter(writer.loop._runner._decoder.parameters())).is_cuda)
    with taken.timed(writer.loop):
        writer.step_seconds(writing.requests(np.random.default_rng(8), writer.vocab_size, repeat(True)))
        taken.shares(0.0)
        start, steps = time.perf_counter(), writer.loop.stats.steps
        writer.write(writing.requests(np.random.default_rng(8), writer.vocab_size, repeat(True)))
        wall, steps = time.perf_counter() - start, writer.loop.stats.steps - steps
    found = {stage: 1000 * seconds / steps for stage, seconds in taken.shares(wall).items()}
    table = Table("stage", "ms a step", "share", title=f"A guided step of {writing.rows} rows, prompts included")
    for stage, milliseconds in found.items():
        table.add_row(stage, f"{milliseconds:.3f}", f"{milliseconds / sum(found.values()):.0%}")
    records.console.print(table)
    return found


def show_costs(by_rows: dict[int, dict[str, float]], bounded: bool, records: Records) -> None:
    """Show guided and plain steps at each number of rows; ``bounded``: the published shapes on a GPU."""
    headings = ["rows", "plain, ms", "guided, ms", "plain, tokens/s", "guided, tokens/s", "guided ÷ plain", "÷ plain, top-k"]
    headings += ["FLOPs, guided ÷ plain", "÷ FLOPs' ratio", f"min_p {MIX_MIN_P}", "candidates there"]
    table = Table(*headings, *(["bound", "÷ bound"] if bounded else []), title=f"A step of decoding, {CANDIDATES} candidates")
    for rows, cost in by_rows.items():
        cells = [f"{rows}", *(f"{cost[f'{name}_ms']:.2f}" for name in ("plain", "guided"))]
        cells += [f"{cost[f'{name}_tokens_per_s']:.0f}" for name in ("plain", "guided")]
        cells += [f"{cost['ratio']:.2f}× ({cost['ratio_min']:.2f}–{cost['ratio_max']:.2f})", f"{cost['top_k_ratio']:.2f}×"]
        cells += [f"{cost['flops_ratio']:.2f}×", f"{cost['over_flops_ratio']:.2f}", f"{cost['mix_ratio']:.2f}×"]
        cells.append(f"{cost['mix_candidates']:.1f}")
        if bounded and rows in BOUNDS:
            cells += [f"{BOUNDS[rows]:.2f}×", f"{cost['ratio'] / BOUNDS[rows]:.2f} (target {TARGETS['cuda']})"]
        table.add_row(*cells)
    records.console.print(table)
    if bounded:
        published = ", ".join(f"{ratio:.2f}× ({name})" for name, ratio in PUBLISHED.items())
        records.console.print(f"Published on one H100, with min_p {MIX_MIN_P}: {published}")
