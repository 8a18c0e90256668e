"""Run one benchmark: ``python -m benchmarks NAME [OPTION ...]``. Imports only the benchmark that is named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Benchmark:
    """One subcommand."""

    function: str
    """``module:name`` of a function that takes the remaining arguments and returns the exit code."""
    help: str


BENCHMARKS = {
    "score": Benchmark("benchmarks.engine.cli:score", "scoring: 10 items of 180 tokens after a query of 120"),
    "catalogue": Benchmark("benchmarks.engine.cli:catalogue", "items first, kept in the prefix cache, beside query first"),
    "eviction": Benchmark("benchmarks.engine.eviction:main", "hit rate of cached items, beside bounds; no model runs"),
    "length": Benchmark("benchmarks.engine.cli:length", "length guidance: its cost beside plain generation, and its effect"),
    "decode": Benchmark("benchmarks.engine.cli:decode", "tokens a second of many generations: log-probabilities, guidance"),
    "step": Benchmark("benchmarks.engine.cli:step", "full scoring steps: wall time, and each kernel's"),
    "accuracy": Benchmark(
        "benchmarks.engine.cli:accuracy", "accuracy of bfloat16, FP8 and int8, on the demo models and random weights"
    ),
    "gpu": Benchmark("benchmarks.engine.cli:gpu", "a run on a GPU machine, in two calls of 8 minutes"),
    "budget": Benchmark("benchmarks.engine.budget:main", "the predicted time of each kernel on an H200, for docs/gpu-budget.md"),
    "peers": Benchmark("benchmarks.engine.peers:main", "scoring on a CPU, beside OpenVINO and ONNX Runtime"),
    "against": Benchmark("benchmarks.engine.against:main", "scoring and decoding on a CPU, beside another checkout's engine"),
    "products": Benchmark("benchmarks.engine.products:main", "matrix products on a CPU with each library"),
    "host": Benchmark(
        "benchmarks.engine.host:main", "processor time of the engine's host for each step, with models that cost nothing"
    ),
    "lookup": Benchmark("benchmarks.engine.lookup:main", "prompt lookup: throughput with and without drafts"),
    "images": Benchmark("benchmarks.engine.images:main", "images: files to pixels and pixels to embeddings, beside transformers"),
    "structured": Benchmark("benchmarks.engine.structured:main", "structured output: time of masks, and throughput"),
    "kernels": Benchmark("benchmarks.kernels.cli:main", "time of each kernel beside the limits of the GPU"),
    "gateway": Benchmark("benchmarks.gateway.cpu:main", "CPU time of the gateway for each score request"),
    "registered": Benchmark("benchmarks.gateway.registered:main", "CPU time of the gateway for requests of registered items"),
    "tokenise": Benchmark("benchmarks.gateway.tokenise:main", "CPU time of tokenising a request, beside the tokenizers library"),
    "stream": Benchmark("benchmarks.gateway.stream:main", "CPU time of the gateway for each streamed token"),
    "rerank": Benchmark("benchmarks.gateway.peer_crossencoder:main", "reranking over HTTP, beside sentence-transformers"),
    "rerank-cpu": Benchmark("benchmarks.gateway.rerank_cpu:main", "CPU time and latency of the gateway for reranking"),
    "proxies": Benchmark("benchmarks.gateway.peer_proxies:main", "CPU time of the gateway for each chat, beside other proxies"),
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
    module, _, name = BENCHMARKS[parsed.benchmark].function.partition(":")
    run: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
    return run(parsed.arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
