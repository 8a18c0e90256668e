"""Command lines of the engine's benchmarks: ``python -m benchmarks score``, ``length``, ``accuracy`` and ``gpu``; ``catalogue``,
``decode`` and ``step`` have their own, and start here in the environment of an engine."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.engine.workload import Workload
from engine.serving.environment import with_defaults
from engine.settings import DTYPES, KV_DTYPES, QUANTIZE

PARTS = ("offline", "online")
SHAPES = ("tiny", "small", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")
"""Keys of :data:`benchmarks.engine.subject.SHAPES`, which imports torch."""
RUNS = {
    "a": "tests, profile, kernels, rates, guidance and decoding, for an H100",
    "b": "profile, rates, log-probabilities, guidance, catalogues and accuracy, for an H200",
    "c": "what they leave out: other systems, steps of 16,384 tokens, adapters, experts, grammars, drafts and images",
}
"""Runs of ``gpu``."""
QUICK_REPEATS, REPEATS = 3, 15
QUICK_SECONDS, SECONDS = 4.0, 30.0


def score(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the scoring benchmark; returns the exit code."""
    parser = _parser("score", "Scoring: 10 items of 180 tokens after a query of 120.")
    _add_parts(parser)
    _add_subject(parser)
    parser.add_argument("--repeats", type=int, help=f"requests measured offline ({REPEATS})")
    parser.add_argument("--quick", action="store_true", help="few repeats and short runs, to see that it works")
    parser.add_argument("--models", type=Path, help="folder in which random weights are kept for other runs")
    add_output(parser)
    parsed = parser.parse_args(arguments)
    _restart_as_engine("score", arguments)
    from benchmarks.engine.score import Options, run
    from benchmarks.engine.servers import ServerError

    parts = {part: getattr(parsed, part) for part in PARTS}
    options = Options(
        **(parts if any(parts.values()) else {"offline": True}),
        sweeps=not parsed.no_sweeps,
        shape=parsed.shape,
        model=parsed.model,
        dtype=parsed.dtype,
        quantize=parsed.quantize,
        repeats=parsed.repeats or (QUICK_REPEATS if parsed.quick else REPEATS),
        quick=parsed.quick,
        url=parsed.url,
        rates=parsed.rates,
        seconds=parsed.seconds or (QUICK_SECONDS if parsed.quick else SECONDS),
        engine_flags=tuple(shlex.split(parsed.engine_flags)),
        max_batched_tokens=parsed.max_batched_tokens,
        workload=parsed.workload,
        out=parsed.out,
        resume=parsed.resume,
        limit=parsed.limit,
        models=parsed.models,
    )
    try:
        return run(options)
    except ServerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def length(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the benchmark of length guidance; returns the exit code."""
    parser = _parser("length", "Length guidance: its cost beside plain generation, and its effect.")
    parser.add_argument("--shape", choices=("demo", "7b"), default="demo", help="the shipped models, or random 7B and 1.5B")
    parser.add_argument("--rows", type=_counts, default=(), help="texts at a time, such as 1,16,100,800 (64; these on a GPU)")
    parser.add_argument("--repeats", type=int, help="of every measurement (5)")
    parser.add_argument("--output", type=int, help="tokens a text (64; 48 on a GPU)")
    parser.add_argument("--texts", type=int, help="at each scale, for the distributions of lengths (128)")
    parser.add_argument("--no-distributions", action="store_true", help="leave the lengths by scale out")
    parser.add_argument("--quick", action="store_true", help="few repeats and short texts, to see that it works")
    add_output(parser)
    parsed = parser.parse_args(arguments)
    _restart_as_engine("length", arguments)
    from benchmarks.engine.length import Options, run

    quick = {"repeats": 2, "output": 24, "texts": 32} if parsed.quick else {}
    given = {name: getattr(parsed, name) for name in ("repeats", "output", "texts") if getattr(parsed, name) is not None}
    options = Options(
        shape=parsed.shape,
        rows=parsed.rows,
        **(quick | given),
        distributions=not parsed.no_distributions,
        out=parsed.out,
        resume=parsed.resume,
        limit=parsed.limit,
    )
    run(options)
    return 0


def accuracy(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the benchmark of number formats; returns the exit code."""
    parser = _parser("accuracy", "Accuracy of bfloat16, FP8 and int8, on the demo models and on random weights.")
    parser.add_argument("--quantize", choices=QUANTIZE, help="only float32, and --dtype with this quantisation (all formats)")
    parser.add_argument("--dtype", choices=DTYPES[:2], help="the dtype of that format (float32)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES[1:], help="the same for keys and values")
    parser.add_argument("--quick", action="store_true", help="a few questions and texts, to see that it works")
    add_output(parser)
    parsed = parser.parse_args(arguments)
    _restart_as_engine("accuracy", arguments)
    from benchmarks.engine.accuracy import QUICK, Format, Sizes, run
    from benchmarks.engine.store import Store

    chosen = Format(parsed.dtype or "float32", parsed.quantize, parsed.kv_dtype or "auto")
    formats = [Format("float32"), chosen] if parsed.dtype or parsed.quantize or parsed.kv_dtype else None
    run(QUICK if parsed.quick else Sizes(), Store(parsed.out, resume=parsed.resume, limit=parsed.limit), formats)
    return 0


def catalogue(arguments: Sequence[str]) -> int:
    """Run the benchmark of catalogues; returns the exit code."""
    return _as_engine("catalogue", arguments)


def decode(arguments: Sequence[str]) -> int:
    """Run the benchmark of many generations; returns the exit code."""
    return _as_engine("decode", arguments)


def step(arguments: Sequence[str]) -> int:
    """Run the benchmark of full steps; returns the exit code."""
    return _as_engine("step", arguments)


def _as_engine(benchmark: str, arguments: Sequence[str]) -> int:
    """Run a benchmark with a command line of its own in the environment of an engine."""
    if not {"-h", "--help"}.intersection(arguments):
        _restart_as_engine(benchmark, arguments)
    run: Callable[[Sequence[str]], int] = import_module(f"benchmarks.engine.{benchmark}").main
    return run(arguments)


def gpu(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and make a run on a GPU machine; returns the exit code."""
    parser = _parser("gpu", "A run on a GPU machine, in two calls of at most 8 minutes.")
    parser.add_argument("--run", choices=RUNS, required=True, help="; ".join(f"{name}: {what}" for name, what in RUNS.items()))
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that comes of it")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of this call (%(default)g)")
    parser.add_argument("--continue", dest="resume", action="store_true", help="run what an earlier call into this folder left")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder without models, written all the time")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="these parts, in the order of the run (all)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few repeats, to see on any machine that it works")
    parsed = parser.parse_args(arguments)
    from benchmarks.engine.gpu import parts, run

    known = [part.name for part in parts(parsed.run, parsed.out, quick=parsed.quick)]
    if unknown := sorted(set(parsed.only) - set(known)):
        parser.error(f"run {parsed.run} has no part {', '.join(unknown)}; it has {', '.join(known)}")
    todo = [part for part in parts(parsed.run, parsed.out, quick=parsed.quick) if not parsed.only or part.name in parsed.only]
    given = {"limit": parsed.limit, "resume": parsed.resume, "archive": parsed.archive, "quick": parsed.quick}
    return run(parsed.run, todo, parsed.out, **given)


def _restart_as_engine(benchmark: str, arguments: Sequence[str]) -> None:
    """Restart the process with the variables of the engine's loop, which libraries read when a process starts."""
    environment = with_defaults(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", benchmark, *arguments], environment)  # noqa: S606 - no shell is wanted


def _parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"python -m benchmarks {benchmark}", description=description)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of a :class:`benchmarks.engine.store.Store`."""
    parser.add_argument("--out", type=Path, help="folder for results, raw records, tables, plot and summary")
    parser.add_argument("--continue", dest="resume", action="store_true", help="measure only what the results in --out lack")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing more is measured")


def _add_parts(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_argument_group("what to run (only --offline unless given)")
    parts.add_argument("--offline", action="store_true", help="against transformers, the roofline, and sweeps over lengths")
    parts.add_argument("--no-sweeps", action="store_true", help="leave the sweeps out")
    parts.add_argument("--online", action="store_true", help="through a gateway over HTTP, with Poisson arrivals")
    parts.add_argument("--url", help="a running gateway that serves the model (starts an engine and a gateway)")
    parts.add_argument("--rates", type=_rates, default=(), help="items a second, such as 600,800,1000 (fractions of the capacity)")
    parts.add_argument("--seconds", type=float, help=f"of arrivals at each rate ({SECONDS:g})")
    parts.add_argument("--engine-flags", default="", help="more flags for the engine that is started, in one word")


def _add_subject(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model")
    model.add_argument("--shape", choices=SHAPES, default="small", help="of random weights (%(default)s)")
    model.add_argument("--model", help="a model directory or hub id, instead of random weights")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    model.add_argument("--quantize", choices=QUANTIZE, help="what the layers' matrix products compute in (--dtype)")
    model.add_argument("--max-batched-tokens", type=int, help="tokens of a step (the engine's default)")
    model.add_argument(
        "--workload", type=_workload, default=Workload(), help="tokens of the query and of an item, and items (120/180/10)"
    )


def _workload(text: str) -> Workload:
    query, item, items = map(int, text.split("/"))
    if query < 0 or min(item, items) <= 0:
        raise argparse.ArgumentTypeError("a workload is three numbers such as 120/180/10; only the first may be 0")
    return Workload(query, item, items)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) <= 0:
        raise argparse.ArgumentTypeError("rows must be greater than 0")
    return counts


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError("rates must be greater than 0")
    return rates
