"""``python -m benchmarks score``: runs the requested parts and prints their tables; the last line is JSON."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import machine, offline, online
from benchmarks.engine.engines import Engine, Transformers
from benchmarks.engine.records import Records, plot
from benchmarks.engine.roofline import measure_peaks, roofline
from benchmarks.engine.servers import describe_engine, serving
from benchmarks.engine.store import Store
from benchmarks.engine.subject import Subject, subject
from benchmarks.engine.workload import Workload
from engine.models.decoder import Decoder

STANDARD = Workload()
SHORT_SECONDS = 10.0
"""Time that one measurement of the offline part may take on a GPU, its compilations included."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    offline: bool = True
    online: bool = False
    sweeps: bool = True
    """Whether ``offline`` also measures the sweeps over lengths."""
    shape: str = "small"
    model: str | None = None
    """Directory or hub id; None: random weights of ``shape``."""
    dtype: str = "float32"
    quantize: str | None = None
    """Quantisation of the engine; transformers computes in ``dtype``."""
    repeats: int = 15
    quick: bool = False
    url: str | None = None
    """URL of a running gateway that serves the model; None: start one."""
    rates: tuple[float, ...] = ()
    seconds: float = 30.0
    engine_flags: tuple[str, ...] = ()
    max_batched_tokens: int | None = None
    """Tokens of a step; None: the engine's default."""
    workload: Workload = STANDARD
    out: Path | None = None
    resume: bool = False
    """Measure only what the results in ``out`` lack."""
    limit: float = math.inf
    """Seconds after which nothing more is measured."""
    models: Path | None = None
    """Folder in which random weights are kept for other runs."""


def run(options: Options) -> int:
    """Print the tables and the JSON line; with ``out``, write a folder. Returns the exit code: 1 if scores do not agree."""
    records = Records(Store(options.out, resume=options.resume, limit=options.limit))
    summary: dict[str, Any] = {"bench": "score", "machine": machine.describe(), "dtype": options.dtype}
    summary |= {"workload": str(options.workload), "max_batched_tokens": options.max_batched_tokens}
    summary["quantize"] = options.quantize
    with subject(options.shape, options.model, options.dtype, options.quantize, options.models) as measured:
        summary["model"] = options.model or options.shape
        if options.offline:
            summary |= _in_process(measured, options, records)
        if options.online:
            summary["online"] = _online(measured, options, records)
    summary["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    summary |= {"left_out": records.store.left_out, "disagree": records.wrong}
    if options.out is not None:
        records.write(options.out, summary)
        if options.online:
            plot(options.out, summary["online"]["rates"], f"{options.workload}, {summary['model']}, {measured.format}")
    print(json.dumps(summary), flush=True)
    if records.wrong:
        print(f"bench: the scores of {', '.join(records.wrong)} do not agree with the engine's", file=sys.stderr)
    return int(bool(records.wrong))


def _in_process(measured: Subject, options: Options, records: Records) -> dict[str, Any]:
    decoder = measured.load()
    engine = Engine(decoder, measured.dtype, max_batched_tokens=options.max_batched_tokens)
    return _offline(measured, decoder, engine, options, records) | {"engine": engine.description}


def _offline(measured: Subject, decoder: Decoder, engine: Engine, options: Options, records: Records) -> dict[str, Any]:
    device = decoder.embed.weight.device
    vocabulary = measured.config.vocab_size
    measure, found = records.store.measure, dict[str, Any]()

    peer = cache(lambda: Transformers(measured, device))

    def compare() -> dict[str, Any]:
        before = measure_peaks(device, getattr(torch, measured.dtype), measured.quantize)
        comparison = offline.compare(engine, decoder, peer(), options.workload, vocabulary, options.repeats, records)
        comparison["agrees"] = offline.agrees(comparison["differences"], measured.tolerance, exact=measured.is_exact)
        peaks = before.or_better(measure_peaks(device, getattr(torch, measured.dtype), measured.quantize))
        workload = options.workload
        limits = roofline(measured.config, measured.dtype, workload, peaks, workload.items / comparison["engine_items_per_s"])
        return {**comparison, "roofline": limits}

    if comparison := measure("comparison", SHORT_SECONDS, compare):
        found |= comparison
        records.wrong += [] if comparison["agrees"] else ["transformers"]
        offline.show_comparison(comparison, measured, records)
        show_roofline(comparison["roofline"], records)
    repeats = min(options.repeats, offline.QUEUED_REPEATS)
    queued = partial(offline.queued, engine, peer, options.workload, vocabulary, repeats, records)
    if rates := measure("queued", SHORT_SECONDS, queued):
        found["queued"] = rates
        offline.show_queued(rates, measured, records)
    for what in (offline.QUICK_SWEEPS if options.quick else offline.SWEEPS) if options.sweeps else ():
        repeats = 1 if options.quick else max(3, options.repeats // 5)
        per_item = measure(f"sweep {what.name}", SHORT_SECONDS, partial(_sweep, engine, vocabulary, what, repeats, records))
        if per_item:
            offline.show_sweep(what, {int(value): taken for value, taken in per_item.items()}, records)
            found["ms_per_item" if what.name == "items" else f"ms_per_item_by_{what.name}"] = per_item
    return found


def _sweep(engine: Engine, vocabulary: int, what: offline.Sweep, repeats: int, records: Records) -> dict[str, float]:
    return {str(value): taken for value, taken in offline.sweep(engine, vocabulary, what, repeats, records).items()}


def _online(measured: Subject, options: Options, records: Records) -> dict[str, Any]:
    plan = online.Plan(options.rates, options.seconds, *((4, 2) if options.quick else ()))
    with _gateway(measured, options) as (url, engine):
        results = online.Online(url, measured.config.vocab_size, records, options.workload).measure(plan)
        described = {} if engine is None else {"engine": describe_engine(engine)}
    online.show(results, records)
    return results | described


@contextmanager
def _gateway(measured: Subject, options: Options) -> Iterator[tuple[str, str | None]]:
    """Its URL, and that of the engine if it was started for this run."""
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1"), None
    else:
        flags = ["--dtype", measured.dtype]
        flags += [] if measured.quantize is None else ["--quantize", measured.quantize]
        flags += [] if options.max_batched_tokens is None else ["--max-batched-tokens", str(options.max_batched_tokens)]
        with serving(measured.directory, [*flags, *options.engine_flags]) as urls:
            yield urls


def show_roofline(limits: dict[str, float], records: Records) -> None:
    """Two lines."""
    records.console.print(
        f"{limits['gflop_an_item']:.1f} GFLOP an item ({limits['gflop_an_item_alone']:.1f} without query sharing), "
        f"{limits['mb_a_request_between_products']:.0f} MB a request between matrix products; "
        f"peaks measured: {limits['peak_gflops']:.0f} GFLOP/s, in the layers' products {limits['peak_gflops_of_layers']:.0f}, "
        f"{limits['peak_gb_per_s']:.1f} GB/s"
    )
    records.console.print(
        f"{limits['percent_of_peak_flops']:.0f} % of the peak; at 100 % {limits['limit_items_per_s']:.1f} items/s, "
        f"with the traffic between products {limits['limit_items_per_s_with_elementwise']:.1f}"
    )
