"""Run one benchmark: ``python -m benchmarks NAME [OPTION ...]``. Imports only the benchmark that is named."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Benchmark:
    """One subcommand."""

    module: str
    """Module with a function ``main`` that takes the remaining arguments and returns the exit code."""
    help: str
    as_engine: bool = False
    """Whether it runs with the variables of the engine's loop, which libraries read when a process starts."""


BENCHMARKS = {
    "score": Benchmark("benchmarks.engine.score", "scoring: 10 items of 180 tokens after a query of 120", True),
    "catalogue": Benchmark("benchmarks.engine.catalogue", "items first, kept in the prefix cache, beside query first", True),
    "length": Benchmark("benchmarks.engine.length", "length guidance: its cost beside plain generation", True),
    "decode": Benchmark("benchmarks.engine.decode", "tokens a second: log-probabilities, guidance, drafts", True),
    "step": Benchmark("benchmarks.engine.step", "full scoring steps: wall time, and each kernel's", True),
    "accuracy": Benchmark("benchmarks.engine.accuracy", "accuracy of bfloat16, FP8 and int8, beside float32", True),
    "gpu": Benchmark("benchmarks.engine.gpu", "a run on a GPU machine, in two calls of 8 minutes"),
    "peers": Benchmark("benchmarks.engine.peers", "scoring on a CPU, beside OpenVINO and llama.cpp", True),
    "gguf": Benchmark("benchmarks.engine.peer_gguf", "a GGUF file on a CPU, beside llama.cpp", True),
    "kernels": Benchmark("benchmarks.kernels.cli", "time of each kernel beside the limits of the GPU"),
    "gateway": Benchmark("benchmarks.gateway.cpu", "CPU time of the gateway for each score request"),
    "modules": Benchmark("benchmarks.gateway.modules", "modules and functions of the gateway that a request passes"),
    "stream": Benchmark("benchmarks.gateway.stream", "CPU time of the gateway for each streamed token"),
    "encoders": Benchmark("benchmarks.gateway.encoders", "encoders over HTTP, beside sentence-transformers and other libraries"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names with the other arguments; returns its exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Benchmarks of engine, kernels and gateway on this machine.",
        epilog="\n".join(["benchmarks:", *(f"  {name:<10} {benchmark.help}" for name, benchmark in BENCHMARKS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", choices=BENCHMARKS, metavar="NAME", help="a benchmark of the list below; NAME --help has its options"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")
    parsed = parser.parse_args(arguments)
    benchmark = BENCHMARKS[parsed.benchmark]
    if benchmark.as_engine and not {"-h", "--help"}.intersection(parsed.arguments):
        _restart_as_engine(arguments)
    run: Callable[[Sequence[str]], int] = import_module(benchmark.module).main
    return run(parsed.arguments)


def _restart_as_engine(arguments: Sequence[str]) -> None:
    """Restart the process with the variables of the engine's loop, unless it has them."""
    from yardstick_llm.engine.server.loop_client import with_defaults

    environment = with_defaults(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *arguments], environment)  # noqa: S606 - no shell is wanted


def _find_packages() -> None:
    """Find the packages of this checkout where it is not installed, as on a GPU host, and in processes started here."""
    if find_spec("yardstick_llm") is None:
        source = str(Path(__file__).parents[1] / "src")
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    try:
        _find_packages()
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
