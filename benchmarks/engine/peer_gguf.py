"""A GGUF file on a CPU, beside llama.cpp: ``python -m benchmarks gguf MODEL.gguf --llamacpp PYTHON``.

Both have the same file and threads, and take turns. *1 stream* and *8 streams* are greedy texts at once, in tokens a second with
the computation of their prompts; *prompts* are those of the standard workload, ten of 300 tokens, one token each. llama.cpp gets
full prompts; the engine computes the query once. The engine takes a turn in each format of ``--formats``; ``recoded`` is int8 with
``--dequantize on``. *Δ* is the mean difference of a log-probability from the first format's, in the workload's scores. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.engine.engines import Engine
from benchmarks.engine.peers import NUMBER_FORMATS, SLOTS, Peer
from benchmarks.engine.records import Records, Store, describe
from benchmarks.engine.subject import Workload
from benchmarks.engine.writing import Writing
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.formats.quantization import format_of
from yardstick_llm.engine.models.formats.stored import IN_INT8
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.source import locate
from yardstick_llm.engine.runner.machine import step_threads

CPU = torch.device("cpu")
FORMATS = NUMBER_FORMATS | {"recoded": NUMBER_FORMATS["int8"]}
PROMPT, OUTPUT = 64, 64
"""Tokens of a text's prompt, and of the text."""
STREAMS = (1, 8)
COMPARED = 5
"""Requests whose scores are compared."""
GREEDY = wire.Sampling(temperature=0, ignore_eos=True)


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks gguf", description="A GGUF file on a CPU, beside llama.cpp.")
    parser.add_argument("model", help="a GGUF file, or ORG/NAME:FILE.gguf")
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON", help="of an environment with xllamacpp (left out)")
    parser.add_argument("--formats", default="float32,int8,recoded", help=f"of {', '.join(FORMATS)} (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the table, the records and the summary")
    options = parser.parse_args(arguments)
    path, records = locate(options.model), Records(Store(options.out))
    threads = torch.get_num_threads()
    peer = None if options.llamacpp is None else Peer("llamacpp", options.llamacpp, path, "gguf")
    works: dict[str, dict[str, Callable[[int], float]]] = {}
    scores: dict[str, Any] = {}
    try:
        for form in options.formats.split(","):
            name = f"Yardstick, {form}"
            works[name], scores[name] = of_engine(path, form, threads)
        if peer is not None:
            works["llama.cpp"] = of_peer(peer, load_config(path).vocab_size)
        rates: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in work} for name, work in works.items()}
        for place in records.progress(range(-1, options.rounds), "rounds"):
            for name, work in works.items():
                for kind, rate in work.items():
                    measured = rate(place)
                    if place >= 0:  # the first round warms up
                        rates[name][kind].append(measured)
                        records.rows.append({"kind": kind, "name": name, "per_s": measured})
    finally:
        if peer is not None:
            peer.close()
    medians = {name: {kind: statistics.median(found) for kind, found in kinds.items()} for name, kinds in rates.items()}
    columns = list(next(iter(works.values())))
    base = next(iter(scores.values()))
    differences = {name: float(np.abs(found - base).mean()) for name, found in scores.items()}
    table = Table("", *columns, "Δ", title=f"{path.name}, {threads} threads")
    for name, of_kinds in medians.items():
        difference = f"{differences[name]:.3f}" if name in differences else ""
        table.add_row(name, *(f"{of_kinds[kind]:.1f}" for kind in columns), difference)
    records.console.print(table)
    version = None if peer is None else peer.version
    found = {"llamacpp": version, "per_s": medians, "differences": differences}
    records.finish({"bench": "gguf", "machine": describe(), "model": path.name} | found)
    return 0


def of_engine(path: Path, form: str, threads: int) -> tuple[dict[str, Callable[[int], float]], Any]:
    """Measurements of the engine by name, each of which takes the number of the round and returns units a second; and scores."""
    name, quantize = FORMATS[form]
    dtype = getattr(torch, name)
    keeps = quantize is not None and form != "recoded"
    decoder = load_model(path, dtype, IN_INT8 if keeps else format_of(quantize, CPU, dtype))
    torch.set_num_threads(threads)  # another engine leaves one to this thread, which computes small steps
    engine = Engine(decoder, name, threads=step_threads(decoder.config, CPU, quantize=quantize), max_total_tokens=SLOTS)
    records = Records()
    vocab_size = decoder.config.vocab_size

    def write(streams: int) -> Callable[[int], float]:
        def rate(place: int) -> float:
            writing = Writing(streams, PROMPT, OUTPUT, GREEDY)
            requests = writing.requests(np.random.default_rng(place + 1), vocab_size, [False] * streams)
            return streams * OUTPUT / records.timed("write", form, lambda: engine.run(requests))

        return rate

    def score(place: int) -> float:
        message = Workload().request(f"r{place}", np.random.default_rng(100 + place), vocab_size)
        return len(message.branches) / records.timed("score", form, lambda: engine.score(message))

    messages = [Workload().request(f"d{place}", np.random.default_rng(place), vocab_size) for place in range(COMPARED)]
    scores = np.array([engine.score(message) for message in messages])
    return {**{titled(streams): write(streams) for streams in STREAMS}, "prompts/s": score}, scores


def of_peer(peer: Peer, vocab_size: int) -> dict[str, Callable[[int], float]]:
    """Measurements of llama.cpp, in the form of :func:`of_engine`."""

    def write(streams: int) -> Callable[[int], float]:
        def rate(place: int) -> float:
            prompts: Any = np.random.default_rng(place + 1).integers(0, vocab_size, (streams, PROMPT)).tolist()
            return streams * OUTPUT / peer.write(prompts, OUTPUT).wall

        return rate

    def score(place: int) -> float:
        message = Workload().request(f"r{place}", np.random.default_rng(100 + place), vocab_size)
        peer.score(message)
        return len(message.branches) / peer.spent.wall

    return {**{titled(streams): write(streams) for streams in STREAMS}, "prompts/s": score}


def titled(streams: int) -> str:
    return f"tokens/s, {streams} stream{'s' * (streams > 1)}"
