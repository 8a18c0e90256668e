"""Structured output: time of masks at a large vocabulary, and throughput of structured rows and of plain rows beside them:
``python -m benchmarks structured``.

- *masks*: the time of each mask, token by token through documents that follow their schemas, with a vocabulary of 151,643 tokens
  made here. With ``--xgrammar PYTHON``, an interpreter with xgrammar, the same documents, tokens and schemas there.
- *alone*: tokens a second of ``--rows`` structured rows, and of as many plain rows of the same length, in turn.
- *beside*: tokens a second of half as many plain rows beside as many other plain rows, and beside structured ones, in turn.

Limits: a mask takes at most 100 µs (median) and 1 ms (P99), structured rows have 95 % of the throughput of plain ones, and plain
rows beside them 98 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.large_vocabulary import tokenizer_json
from benchmarks.engine.machine import describe
from benchmarks.engine.subject import SHAPES, random_decoder
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.models.loader import save_model
from engine.settings import EngineSettings
from engine.structured.compiler import Compiler
from engine.structured.vocabulary import load_vocabulary
from gateway.structure.grammar import of_json_schema

TOKENS, HEAD_ROWS = 151_643, 151_936
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "kind": {"enum": ["reader", "writer", "editor"]},
        "address": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"street": {"type": "string"}}}]},
    },
    "required": ["name", "age", "email", "tags", "kind", "address"],
    "additionalProperties": False,
}
CASES: tuple[tuple[dict[str, Any], Any], ...] = (
    (
        PERSON,
        {
            "name": "Ada Lovelace, Countess",
            "age": 36,
            "email": "ada@engine.com",
            "tags": ["mathematics", "poetical science", "notes"],
            "kind": "writer",
            "address": {"street": "12 St James's Square"},
        },
    ),
    ({"type": "array", "items": {"type": "integer"}}, list(range(0, 4000, 137))),
    ({"type": "object"}, {"free": {"text": "some words in a sentence that goes on", "list": [1.5, None, True, {"a": []}]}}),
    ({"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(60)}}, {"field_7": "x", "field_59": "y z"}),
    ({"enum": [f"value number {i}" for i in range(500)]}, "value number 345"),
)
LONG = {"type": "array", "items": PERSON, "minItems": 1000}
"""Does not end before the rows' tokens do."""
PEER = """
import json, sys, time
import numpy as np, torch, xgrammar as xgr
given = json.load(open(sys.argv[1]))
info = xgr.TokenizerInfo(given["vocabulary"], xgr.VocabType.BYTE_LEVEL, vocab_size=given["rows"], stop_token_ids=[given["eos"]])
compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
masks, compiled = [], []
bits = xgr.allocate_token_bitmask(1, given["rows"])
for schema, tokens in given["cases"]:
    for _ in range(given["repeats"]):
        began = time.perf_counter()
        matcher = xgr.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), any_whitespace=True))
        compiled.append(time.perf_counter() - began)
        for token in tokens:
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            masks.append(time.perf_counter() - began)
            assert matcher.accept_token(token)
print(json.dumps({"masks": masks, "compiled": compiled}))
"""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks structured", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="structured rows")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=TOKENS, help="tokens of the vocabulary, the special ones not counted")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the random model (%(default)s)")
    parser.add_argument("--layers", type=int, help="layers of the model (those of the shape)")
    parser.add_argument("--threads", type=int, help="threads of the model")
    parser.add_argument("--xgrammar", metavar="PYTHON", help="interpreter with xgrammar")
    options = parser.parse_args(arguments)
    text = tokenizer_json(options.vocabulary)
    result: dict[str, Any] = {"benchmark": "structured", "options": vars(options), "machine": describe()}
    result["masks"] = measure_masks(text, options.vocabulary, options.repeats)
    if options.xgrammar is not None:
        result["xgrammar"] = measure_peer(text, options)
    with tempfile.TemporaryDirectory(prefix="yardstick-bench-") as folder:
        loop = make_loop(Path(folder), text, options)
        result |= measure_rows(loop, options.rows, options.tokens, options.repeats)
        loop.close()
    result["load_after"] = describe()["load"]
    for name, value in result.items():
        print(f"{name:<10} {value}")
    print(json.dumps(result))
    return 0


def summary(masks: Sequence[float], compiled: Sequence[float]) -> dict[str, float]:
    """Times of masks in microseconds, and of compiling in milliseconds."""
    median, p99 = np.percentile(masks, [50, 99]) * 1e6
    return {
        "count": len(masks),
        "median_us": round(float(median), 1),
        "p99_us": round(float(p99), 1),
        "max_us": round(max(masks) * 1e6, 1),
        "compile_median_ms": round(statistics.median(compiled) * 1e3, 2),
        "compile_max_ms": round(max(compiled) * 1e3, 2),
    }


def measure_masks(text: bytes, vocabulary: int, repeats: int) -> dict[str, float]:
    """Time each mask of every case, in one thread. Compiling includes the first mask."""
    loaded = load_vocabulary(text, vocabulary + HEAD_ROWS - TOKENS, [vocabulary + 2])
    compiler = Compiler(loaded)
    masks: list[float] = []
    compiled: list[float] = []
    for schema, document in CASES:
        tokens = loaded.tokenizer.tokenize_str(json.dumps(document))
        compiler.begin(wire.Caller(), of_json_schema(schema), 1, ()).result()  # the checker has started after the first
        for repeat in range(repeats):
            began = time.perf_counter()
            caller = wire.Caller(tenant=f"t{repeat}")  # for which nothing is kept
            (constraint,) = compiler.begin(caller, of_json_schema(schema), 1, ()).result()
            compiled.append(time.perf_counter() - began)
            for token in tokens:
                constraint.advance(token)
                constraint.compute_mask()
                assert constraint.problem is None, constraint.problem
                masks.append(constraint.last_seconds)
    compiler.close()
    return summary(masks, compiled)


def measure_peer(text: bytes, options: argparse.Namespace) -> dict[str, float]:
    """Measure the masks of xgrammar, which runs in a separate process."""
    document = json.loads(text)
    vocabulary = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    tokenizer = load_vocabulary(text, options.vocabulary + HEAD_ROWS - TOKENS, [options.vocabulary + 2]).tokenizer
    cases = [(schema, tokenizer.tokenize_str(json.dumps(example))) for schema, example in CASES]
    given = {
        "vocabulary": vocabulary + [token["content"] for token in document["added_tokens"]],
        "rows": options.vocabulary + HEAD_ROWS - TOKENS,
        "eos": options.vocabulary + 2,
        "cases": cases,
        "repeats": options.repeats,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(given, file)
        file.flush()
        command = [options.xgrammar, "-c", PEER, file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)  # noqa: S603
    told = json.loads(done.stdout.splitlines()[-1])
    return summary(told["masks"], told["compiled"])


def make_loop(directory: Path, text: bytes, options: argparse.Namespace) -> Loop:
    """An engine with random weights and the vocabulary of ``text``."""
    rows = options.vocabulary + HEAD_ROWS - TOKENS
    config = replace(SHAPES[options.shape], vocab_size=rows, eos_token_ids=(options.vocabulary + 2,))
    config = replace(config, num_layers=options.layers or config.num_layers)
    save_model(random_decoder(config), config, directory, torch.float32)
    (directory / "tokenizer.json").write_bytes(text)
    slots = 2 * options.rows * (options.tokens + 64)
    return build_loop(EngineSettings(model=str(directory), name="bench", max_total_tokens=slots, threads=options.threads))


def measure_rows(loop: Loop, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Throughput of structured rows against plain ones, and of plain rows beside each kind, in turn."""
    ratios: dict[str, list[float]] = {"alone": [], "beside": []}
    rates: dict[str, list[float]] = {"plain": [], "structured": [], "plain_beside_structured": []}
    run(loop, [False, True], tokens, "warm")
    for repeat in range(repeats):
        plain = run(loop, [False] * rows, tokens, f"p{repeat}")
        structured = run(loop, [True] * rows, tokens, f"s{repeat}")
        mixed = run(loop, [False, True] * (rows // 2), tokens, f"m{repeat}")
        again = run(loop, [False] * rows, tokens, f"q{repeat}")
        base = (plain + again) / 2
        for name, rate in (("plain", base), ("structured", structured), ("plain_beside_structured", mixed)):
            rates[name].append(round(rate, 1))
        ratios["alone"].append(structured / base)
        ratios["beside"].append(mixed / base)
    told: dict[str, Any] = {f"{name}_tokens_per_s": values for name, values in rates.items()}
    for name, values in ratios.items():
        told[f"{name}_ratio"] = {"median": round(statistics.median(values), 4), "each": [round(value, 4) for value in values]}
    return told


def run(loop: Loop, structured: Sequence[bool], tokens: int, name: str) -> float:
    """Generate ``tokens`` in each row at once; returns tokens a second until the rows of the first row's kind have ended.

    Every row gets one token a step, so the rate of these rows is a fixed share of the result.
    """
    grammar = of_json_schema(LONG)
    kinds: dict[str, bool] = {}
    for place, follows in enumerate(structured):
        message = wire.Generate(
            f"{name}-{place}",
            [place + 1, 5, 6, 7],
            wire.Sampling(max_tokens=tokens, seed=place, ignore_eos=not follows),
            grammar=grammar if follows else "",
        )
        kinds[message.id] = follows
        loop.submit(message)
    waited = {id for id, kind in kinds.items() if kind == structured[0]}
    finished, began, ended = set[str](), time.perf_counter(), 0.0
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise RuntimeError(reply.message)
            if isinstance(reply, wire.Delta) and reply.finish is not None:
                finished.add(reply.id)
        if not ended and waited <= finished:
            ended = time.perf_counter()
    return len(structured) * tokens / (ended - began)
