"""Prompt lookup: tokens a second with drafts relative to without, in one engine: ``python -m benchmarks lookup``.

The model has random weights; ``logit_bias`` and ``allowed_token_ids`` decide what is written, so the cost of a step is real and the
share of accepted drafts is set.

- *copy*: one token is allowed, so every draft is right, as where a text is copied.
- *mixed*: four tokens are allowed, drawn at temperature 1, so that n-grams recur and most drafts are wrong after a few tokens.
- *free*: all tokens are allowed, drawn at temperature 1; nothing recurs and nothing is drafted.
- *wrong*: each token occurs in the prompt before one that is not allowed and is rarely drawn again, so that each step could have a
  draft and nearly every draft is wrong. Drafts then cost most for what they yield.

In each round, plain decoding and each limit of rows (``--prompt-lookup-rows``) follow each other, forwards and backwards in turn.
The medians of the ratios of the process's CPU time in one round are reported, which other processes change less than the time on
the clock; on a GPU, those of the time on the clock. The table of outputs and batch sizes by limits shows where drafts pay, and the
mean over all of them which limit does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.engine.machine import describe
from benchmarks.engine.subject import SHAPES, random_decoder
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.models.loader import save_model
from engine.settings import CPU_DRAFT_ROWS, EngineSettings

WRONG = tuple(range(20, 320))
"""Tokens of the output *wrong*."""
LINE = "{output:>6} batch {batch:>3}, {rows:>3} rows: {ratio:.3f} x, {accepted:.0%} of {drafted} drafted accepted"
ALLOWED: dict[str, tuple[int, ...] | None] = {"copy": (7,), "mixed": (7, 8, 9, 10), "free": None, "wrong": WRONG}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each output and batch size, and all results as JSON last."""
    parser = argparse.ArgumentParser("python -m benchmarks lookup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="shape of the random model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences at a time")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of rounds")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[CPU_DRAFT_ROWS], help="--prompt-lookup-rows, one engine for each")
    parser.add_argument("--threads", type=int, default=None, help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for summary.json and tables.txt")
    parser.add_argument("--outputs", nargs="+", choices=sorted(ALLOWED), default=list(ALLOWED))
    asked = parser.parse_args(arguments)
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        loops = _loops(Path(directory), asked)
        for output in asked.outputs:
            for batch in asked.batches:
                found = _measure(loops, output, batch, asked)
                cases += found
                for case in found:
                    print(LINE.format(**case), flush=True)
    result = {
        "machine": describe(),
        "settings": {name: value for name, value in vars(asked).items() if name != "out"},
        "rows": cases,
        "means": {rows: round(_mean(cases, rows), 3) for rows in asked.rows},
    }
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (asked.out / "tables.txt").write_text(tables(cases) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def tables(cases: Sequence[dict[str, Any]]) -> str:
    """A table of all outputs and batch sizes, with a column of ratios for each limit of rows."""
    limits = list(dict.fromkeys(case["rows"] for case in cases))
    lines = ["| output | batch | " + " | ".join(f"{limit} rows" for limit in limits) + " |", "| --- " * (2 + len(limits)) + "|"]
    for output, batch in dict.fromkeys((case["output"], case["batch"]) for case in cases):
        found = {case["rows"]: case for case in cases if (case["output"], case["batch"]) == (output, batch)}
        cells = [f"{found[limit]['ratio']:.2f} × ({_accepted(found[limit])})" for limit in limits]
        lines.append(f"| {output} | {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _accepted(case: dict[str, Any]) -> str:
    return f"{case['accepted']:.0%} of {case['drafted']:,}" if case["drafted"] else "no drafts"


def _mean(cases: Sequence[dict[str, Any]], rows: int) -> float:
    """Geometric mean of the ratios with this limit."""
    return statistics.geometric_mean(case["ratio"] for case in cases if case["rows"] == rows)


def _loops(directory: Path, asked: argparse.Namespace) -> dict[int, Loop]:
    """An engine for each limit of rows."""
    config = SHAPES[asked.shape]
    save_model(random_decoder(config), config, directory, torch.float32)
    threads = asked.threads or torch.get_num_threads()  # which the first loop may change for this thread
    settings = EngineSettings(model=str(directory), name="lookup", max_total_tokens=32768, threads=threads)
    return {rows: build_loop(msgspec.structs.replace(settings, prompt_lookup_rows=rows)) for rows in asked.rows}


def _measure(loops: dict[int, Loop], output: str, batch: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    ratios: dict[int, list[float]] = {rows: [] for rows in loops}
    speeds = []
    before = {rows: loop.stats for rows, loop in loops.items()}
    for number in range(asked.rounds + 1):
        order = [None, *loops] if number % 2 else [*reversed(loops), None]
        # Decoding without drafts is the same with any limit.
        found = {
            rows: _speed(loops[rows or asked.rows[0]], output, batch, asked, asked.draft_tokens if rows else 0, number)
            for rows in order
        }
        if number:  # the first round warms up
            speeds.append(found[None])
            for rows in loops:
                ratios[rows].append(found[rows] / found[None])
    cases = []
    for rows, loop in loops.items():
        drafted = loop.stats.draft_tokens - before[rows].draft_tokens
        accepted = loop.stats.accepted_draft_tokens - before[rows].accepted_draft_tokens
        cases.append(
            {
                "output": output,
                "batch": batch,
                "rows": rows,
                "ratio": round(statistics.median(ratios[rows]), 3),
                "ratios": [round(ratio, 3) for ratio in ratios[rows]],
                "plain_tokens_per_second": round(statistics.median(speeds), 1),
                "drafted": drafted,
                "accepted": round(accepted / drafted, 3) if drafted else 0.0,
            }
        )
    return cases


def _speed(loop: Loop, output: str, batch: int, asked: argparse.Namespace, draft_tokens: int, number: int) -> float:
    """Output tokens for each second of CPU time or, on a GPU, of time, of ``batch`` sequences that begin together."""
    for place in range(batch):
        sampling = wire.Sampling(
            max_tokens=asked.tokens,
            seed=1000 * number + place,
            ignore_eos=True,
            allowed_token_ids=ALLOWED[output],
            presence_penalty=2.0 if output == "wrong" else 0.0,
        )
        if output == "wrong":
            prompt = [token for each in WRONG for token in (each, 11)]
        else:
            prompt = [11 + (place * 31 + at * 7) % 200 for at in range(asked.prompt)]
        lookup = wire.DraftOptions(draft_tokens, 1 if output == "wrong" else 3)
        loop.submit(wire.Generate(f"{place}", prompt, sampling, prompt_lookup=lookup, caller=wire.Caller(keep_prefix=False)))
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began, tokens = clock(), batch * int(asked.tokens)
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise RuntimeError(f"The request {reply.id} failed: {reply.message}")
    return tokens / (clock() - began)
