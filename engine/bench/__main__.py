"""``python -m engine.bench score``, ``length``, ``accuracy`` and ``gpu``"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from engine.link import MALLOC
from engine.settings import DTYPES, QUANTIZE

PARTS = ("offline", "ablations", "online")
QUICK_REPEATS, REPEATS = 3, 15
QUICK_SECONDS, SECONDS = 4.0, 30.0


def main() -> int:
    """Run one benchmark, under the memory settings that the engine's loop runs under; returns the exit code."""
    arguments = _parser().parse_args()
    command: str = arguments.command
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "engine.bench", *sys.argv[1:]], MALLOC | os.environ)  # noqa: S606
    if command == "gpu":
        from engine.bench import gpu

        return gpu.run(arguments.out)
    if command == "accuracy":
        from engine.bench import accuracy

        accuracy.run(accuracy.QUICK if arguments.quick else accuracy.Sizes(), arguments.out)
        return 0
    if command == "length":
        return _length(arguments)
    from engine.bench import score
    from engine.bench.servers import ServerError

    parts = {part: getattr(arguments, part) for part in PARTS}
    options = score.Options(
        **(parts if any(parts.values()) else {"offline": True}),
        sweeps=not arguments.no_sweeps,
        shape=arguments.shape,
        model=arguments.model,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        repeats=arguments.repeats or (QUICK_REPEATS if arguments.quick else REPEATS),
        quick=arguments.quick,
        url=arguments.url,
        rates=arguments.rates,
        seconds=arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS),
        engine_flags=tuple(shlex.split(arguments.engine_flags)),
        out=arguments.out,
    )
    try:
        score.run(options)
    except ServerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def _length(arguments: argparse.Namespace) -> int:
    from engine.bench import length

    quick = {"repeats": 2, "output": 24, "texts": 32} if arguments.quick else {}
    given = {name: getattr(arguments, name) for name in ("repeats", "output", "texts") if getattr(arguments, name) is not None}
    length.run(
        length.Options(
            shape=arguments.shape,
            rows=arguments.rows,
            **(quick | given),
            ablations=not arguments.no_ablations,
            distributions=not arguments.no_distributions,
            out=arguments.out,
        )
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m engine.bench", description="Benchmarks of the engine on this machine.")
    commands = parser.add_subparsers(required=True, dest="command")
    score = commands.add_parser("score", help="scoring: 10 items of 180 tokens after a query of 120")
    _add_parts(score)
    _add_subject(score)
    score.add_argument("--repeats", type=int, help=f"requests measured offline ({REPEATS})")
    score.add_argument("--quick", action="store_true", help="few repeats and short runs, to see that it works")
    score.add_argument("--out", type=Path, help="folder for raw records, tables, plot and summary")
    accuracy = commands.add_parser("accuracy", help="what bfloat16 and FP8 cost, on the demo models and on random weights")
    accuracy.add_argument("--quick", action="store_true", help="a few questions and texts, to see that it works")
    accuracy.add_argument("--out", type=Path, help="folder for the tables and the summary")
    _add_length(commands.add_parser("length", help="length guidance: its cost beside plain generation, and its effect"))
    gpu = commands.add_parser(
        "gpu", help="all that a GPU machine is needed for: tests, kernels, scoring, guidance; at most 8 minutes"
    )
    gpu.add_argument("--out", type=Path, required=True, help="folder for everything that comes of it")
    return parser


def _add_length(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=("demo", "7b"), default="demo", help="the shipped models, or random 7B and 1.5B")
    parser.add_argument("--rows", type=_counts, default=(), help="texts at a time, such as 1,16,100,800 (64; these on a GPU)")
    parser.add_argument("--repeats", type=int, help="of every measurement (5)")
    parser.add_argument("--output", type=int, help="tokens a text (64; 48 on a GPU)")
    parser.add_argument("--texts", type=int, help="at each scale, for the distributions of lengths (128)")
    parser.add_argument("--no-ablations", action="store_true", help="leave the ablations out")
    parser.add_argument("--no-distributions", action="store_true", help="leave the lengths by scale out")
    parser.add_argument("--quick", action="store_true", help="few repeats and short texts, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for raw records, tables, plot and summary")


def _add_parts(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_argument_group("what to run (only --offline unless given)")
    parts.add_argument("--offline", action="store_true", help="against transformers, the roofline, and sweeps over lengths")
    parts.add_argument("--no-sweeps", action="store_true", help="leave the sweeps out")
    parts.add_argument("--ablations", action="store_true", help="what each optimisation is worth")
    parts.add_argument("--online", action="store_true", help="through a gateway over HTTP, with Poisson arrivals")
    parts.add_argument("--url", help="a running gateway that serves the model (starts an engine and a gateway)")
    parts.add_argument("--rates", type=_rates, default=(), help="items a second, such as 600,800,1000 (fractions of the capacity)")
    parts.add_argument("--seconds", type=float, help=f"of arrivals at each rate ({SECONDS:g})")
    parts.add_argument("--engine-flags", default="", help="more flags for the engine that is started, in one word")


def _add_subject(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model")
    model.add_argument("--shape", choices=("small", "qwen3-0.6b"), default="small", help="of random weights (%(default)s)")
    model.add_argument("--model", help="a model directory or hub id, instead of random weights")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    model.add_argument("--quantize", choices=QUANTIZE, help="what the layers' matrix products compute in (--dtype)")


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


if __name__ == "__main__":
    sys.exit(main())
