"""Scoring, the standard workload: ``python -m benchmarks score``. The last line is JSON.

*Offline*: the engine's loop and Hugging Face transformers in this process, in turn on the same requests, with the same threads and
weights; their scores must agree. First one request at a time, then many queued at once. *Online*: through a gateway over HTTP.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.engine import online
from benchmarks.engine.engines import Engine, Scorer, Transformers
from benchmarks.engine.records import Records, add_output, describe, opened
from benchmarks.engine.servers import ServerError, describe_engine, serving
from benchmarks.engine.subject import SHAPES, Subject, Workload, subject
from yardstick_llm.engine import wire
from yardstick_llm.engine.settings import DTYPES, QUANTIZE

QUICK_REPEATS, REPEATS = 3, 15
QUICK_SECONDS, SECONDS = 4.0, 30.0
SHORT_SECONDS = 10.0
"""Time that one measurement of the offline part may take on a GPU, its compilations included."""
QUEUED = {"cpu": 2, "cuda": 40}
"""Requests queued at once."""
QUEUED_REPEATS = 3
PEER_BATCHES = {"cpu": (10,), "cuda": (10, 40, 100, 200)}
"""Prompts of a batch of transformers, whose best is reported."""


def main(arguments: Sequence[str]) -> int:
    """Print the tables and the JSON line; returns the exit code: 1 if scores do not agree."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks score", description="Scoring: 10 items of 180 tokens after a query of 120."
    )
    parts = parser.add_argument_group("what to run (only --offline unless given)")
    parts.add_argument("--offline", action="store_true", help="against transformers")
    parts.add_argument("--online", action="store_true", help="through a gateway over HTTP, with Poisson arrivals")
    parts.add_argument("--rates", type=_rates, default=(), help="items a second, such as 600,800,1000 (fractions of the capacity)")
    parts.add_argument("--seconds", type=float, help=f"of arrivals at each rate ({SECONDS:g})")
    parts.add_argument("--engine-flags", default="", help="more flags for the engine that is started, in one word")
    model = parser.add_argument_group("the model")
    model.add_argument("--shape", choices=SHAPES, default="small", help="of random weights (%(default)s)")
    model.add_argument("--model", help="a model directory or hub id, instead of random weights")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    model.add_argument("--quantize", choices=QUANTIZE, help="what the layers' matrix products compute in; transformers: --dtype")
    model.add_argument("--max-batched-tokens", type=int, help="tokens of a step (the engine's default)")
    sizes = "tokens of the query and of an item, and items (120/180/10)"
    model.add_argument("--workload", type=_workload, default=Workload(), help=sizes)
    parser.add_argument("--repeats", type=int, help=f"requests measured offline ({REPEATS})")
    parser.add_argument("--quick", action="store_true", help="few repeats and short runs, to see that it works")
    parser.add_argument("--models", type=Path, help="folder in which random weights are kept for other runs")
    add_output(parser)
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    try:
        return run(options)
    except ServerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Run the parts; see :func:`main`."""
    records = opened(options)
    summary: dict[str, Any] = {"bench": "score", "machine": describe(), "dtype": options.dtype, "quantize": options.quantize}
    summary |= {"workload": str(options.workload), "max_batched_tokens": options.max_batched_tokens}
    with subject(options.shape, options.model, options.dtype, options.quantize, options.models) as measured:
        summary["model"] = options.model or options.shape
        if options.offline or not options.online:
            summary |= _offline(measured, options, records)
        if options.online:
            flags = ["--dtype", measured.dtype, *shlex.split(options.engine_flags)]
            flags += [] if measured.quantize is None else ["--quantize", measured.quantize]
            flags += [] if options.max_batched_tokens is None else ["--max-batched-tokens", str(options.max_batched_tokens)]
            with serving(measured.directory, flags) as (url, engine):
                client = online.Online(url, measured.config.vocab_size, records, options.workload)
                found = client.measure(options.rates, options.seconds, *((4, 2) if options.quick else ()))
                summary["online"] = found | {"engine": describe_engine(engine)}
            online.show(found, records)
    summary["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    summary |= {"left_out": records.store.left_out, "disagree": records.wrong}
    records.finish(summary)
    if records.wrong:
        print(f"bench: the scores of {', '.join(records.wrong)} do not agree with the engine's", file=sys.stderr)
    return int(bool(records.wrong))


def _offline(measured: Subject, options: argparse.Namespace, records: Records) -> dict[str, Any]:
    decoder = measured.load()
    engine = Engine(decoder, measured.dtype, max_batched_tokens=options.max_batched_tokens)
    device = decoder.embed.weight.device
    vocabulary, workload = measured.config.vocab_size, options.workload
    found: dict[str, Any] = {}
    peer = cache(lambda: Transformers(measured, device))

    def compared() -> dict[str, Any]:
        comparison = compare(engine, peer(), workload, vocabulary, options.repeats, records)
        return {**comparison, "agrees": agrees(comparison["differences"], measured.tolerance, exact=measured.is_exact)}

    if comparison := records.store.measure("comparison", SHORT_SECONDS, compared):
        found |= comparison
        records.wrong += [] if comparison["agrees"] else ["transformers"]
        show_comparison(comparison, measured, records)
    repeats = min(options.repeats, QUEUED_REPEATS)
    many = partial(queued, engine, peer, workload, vocabulary, repeats, device.type, records)
    if rates := records.store.measure("queued", SHORT_SECONDS, many):
        found["queued"] = rates
        peers = ", ".join(f"{rate:.1f} in batches of {batch}" for batch, rate in rates["transformers_items_per_s"].items())
        records.console.print(
            f"{rates['requests']} requests queued, {measured.format}: {rates['engine_items_per_s']:.1f} items/s; transformers in "
            f"{measured.dtype} {peers} prompts; {rates['ratio']:.2f} × the best of them"
        )
    return found | {"engine": engine.description}


def compare(engine: Engine, peer: Scorer, workload: Workload, vocab_size: int, repeats: int, records: Records) -> dict[str, Any]:
    """Measure a workload, one request at a time, alternating between engine and peer on the same requests."""
    rng = np.random.default_rng(0)
    engine.score(workload.request("warm", rng, vocab_size))  # compiles kernels
    apart: list[float] = []
    ours, theirs = [], []
    for repeat in records.progress(range(repeats), "against transformers"):
        message = workload.request(f"r{repeat}", rng, vocab_size)
        ours.append(records.timed("offline", "Yardstick", partial(engine.score, message)))
        theirs.append(records.timed("offline", "transformers", partial(peer.score, message)))
        apart += np.abs(np.subtract(engine.score(message), peer.score(message))).flatten().tolist()
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "engine_items_per_s": workload.items / statistics.median(ours),
        "transformers_items_per_s": workload.items / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "differences": spread(apart),
        "largest_difference": max(apart),
    }


def queued(
    engine: Engine,
    peer: Callable[[], Transformers],
    workload: Workload,
    vocab_size: int,
    repeats: int,
    device: str,
    records: Records,
) -> dict[str, Any]:
    """Measure many requests queued at once, in turn: in the engine, and in the peer as batches of full prompts."""
    rng, count = np.random.default_rng(4), QUEUED[device]
    scorers: dict[str, Callable[[list[wire.Score]], object]] = {"engine": engine.score_all}
    for batch in PEER_BATCHES[device]:
        scorers[str(batch)] = partial(peer().score_all, batch=batch)
    rates: dict[str, list[float]] = {name: [] for name in scorers}
    for repeat in records.progress(range(repeats + 1), f"{count} requests queued"):
        messages = [workload.request(f"q{repeat}-{place}", rng, vocab_size) for place in range(count)]
        for name, score in scorers.items():
            taken = records.timed("queued", name, partial(score, messages))
            if repeat:  # the first round warms up
                rates[name].append(count * workload.items / taken)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ours, peers = middle.pop("engine"), middle
    return {"requests": count, "engine_items_per_s": ours, "transformers_items_per_s": peers, "ratio": ours / max(peers.values())}


def spread(apart: Sequence[float]) -> dict[str, float]:
    """Return the distribution of absolute differences."""
    values = np.array(apart)
    shares = {f"p{share}": float(np.percentile(values, share, method="inverted_cdf")) for share in (50, 90, 99)}
    return {"values": float(len(values)), "rms": float(np.sqrt((values**2).mean())), **shares, "max": float(values.max())}


def agrees(found: Mapping[str, float], tolerance: float, *, exact: bool) -> bool:
    """Whether differences of this distribution are rounding. The largest of many values in few bits is an accident, so the bound
    holds for nine tenths of them; ``exact``: for all."""
    return found["max" if exact else "p90"] <= tolerance


def show_comparison(comparison: Mapping[str, Any], measured: Subject, records: Records) -> None:
    """Print the times of engine and peer."""
    table = Table(f"one request at a time, {measured.format}", "items/s", "against transformers", title="Scoring, engine only")
    ratio = f"{comparison['ratio']:.2f}× ({comparison['ratio_min']:.2f}–{comparison['ratio_max']:.2f})"
    table.add_row("Yardstick", f"{comparison['engine_items_per_s']:.1f}", ratio)
    table.add_row(f"transformers, one batch, {measured.dtype}", f"{comparison['transformers_items_per_s']:.1f}", "1")
    records.console.print(table)
    apart = comparison["differences"]
    records.console.print(
        f"difference of {apart['values']:.0f} log-probabilities: median {apart['p50']:.1e}, P90 {apart['p90']:.1e}, "
        f"P99 {apart['p99']:.1e}, largest {apart['max']:.1e}" + ("" if comparison["agrees"] else "; THE SCORES DO NOT AGREE")
    )


def _workload(text: str) -> Workload:
    query, item, items = map(int, text.split("/"))
    if query < 0 or min(item, items) <= 0:
        raise argparse.ArgumentTypeError("a workload is three numbers such as 120/180/10; only the first may be 0")
    return Workload(query, item, items)


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError("rates must be greater than 0")
    return rates
