"""Computes workloads with the engine of the checkout it is started in (see :mod:`benchmarks.engine.against`).

Arguments: model directory, threads, number format. Prints ``{"ready": true}`` when the model is loaded. Each line of standard
input has the name of a workload and a seed; each answer is a line with the seconds of wall and CPU time, and the scores or
tokens. It imports only what every version of the engine has.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.settings import EngineSettings

FORMATS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "bfloat16-int8": ("bfloat16", "int8"),
}
"""Number formats: dtype, and format of the layers' matrix products."""
SLOTS = 16_384
QUERY, ITEM, ITEMS = 120, 180, 10
PROMPT, OUTPUT = 16, 32
"""Tokens of a row that decodes."""


def score(draws: random.Random, vocabulary: int) -> list[wire.Request]:
    """One request of the standard workload."""
    items = [_tokens(draws, vocabulary, ITEM) for _ in range(ITEMS)]
    return [wire.Score("score", _tokens(draws, vocabulary, QUERY), items, wire.Labels([17, 42]))]


def decode(draws: random.Random, vocabulary: int, rows: int) -> list[wire.Request]:
    """Greedy generations that advance together."""
    sampling = wire.Sampling(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    return [wire.Generate(f"row-{row}", _tokens(draws, vocabulary, PROMPT), sampling) for row in range(rows)]


WORKLOADS: dict[str, Callable[[random.Random, int], list[wire.Request]]] = {
    "score": score,
    "decode 32": lambda draws, vocabulary: decode(draws, vocabulary, 32),
    "decode 8": lambda draws, vocabulary: decode(draws, vocabulary, 8),
    "decode 1": lambda draws, vocabulary: decode(draws, vocabulary, 1),
}


def run(loop: Loop, requests: list[wire.Request]) -> list[Any]:
    """Run all requests to their end; returns their scores or tokens, by the requests' names."""
    for request in requests:
        loop.submit(request)
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    while not loop.idle:
        for reply in loop.step():
            assert isinstance(reply, wire.Scored | wire.Delta), reply
            found[reply.id] += [number for row in reply.rows for number in row] if isinstance(reply, wire.Scored) else reply.tokens
    return [numbers for _, numbers in sorted(found.items())]


def main(model: str, threads: str, form: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    dtype, quantize = FORMATS[form]
    settings = EngineSettings(
        model=model, name="bench", dtype=dtype, quantize=quantize, threads=int(threads), max_total_tokens=SLOTS
    )
    loop = build_loop(settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        name, seed = json.loads(line)
        requests = WORKLOADS[name](random.Random(seed), loop.info.vocab_size)
        wall, cpu = time.perf_counter(), time.process_time()
        found = run(loop, requests)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**spent, "found": found}), file=answers, flush=True)


def _tokens(draws: random.Random, vocabulary: int, count: int) -> list[int]:
    return [draws.randrange(vocabulary) for _ in range(count)]


if __name__ == "__main__":
    main(*sys.argv[1:])
