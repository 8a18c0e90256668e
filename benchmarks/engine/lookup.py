"""Prompt lookup: tokens a second with drafts relative to without, in one engine: ``python -m benchmarks lookup``.

The model has random weights; ``logit_bias`` and ``allowed_token_ids`` decide what is written, so the cost of a step is real and the
share of accepted drafts is set.

- *copy*: one token is allowed, so every draft is right, as where a text is copied.
- *mixed*: four tokens are allowed, drawn at temperature 1, so that n-grams recur and most drafts are wrong after a few tokens.
- *free*: all tokens are allowed, drawn at temperature 1; nothing recurs and nothing is drafted.
- *wrong*: each token occurs in the prompt before one that is not allowed and is rarely drawn again, so that each step could have a
  draft and nearly every draft is wrong. Drafts then cost most for what they yield.

Rounds with and without drafts alternate; the median of the ratios of the process's CPU time is reported, which other processes
change less than the time on the clock.
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

import torch

from benchmarks.engine.machine import describe
from benchmarks.engine.subject import SHAPES, random_decoder
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.models.loader import save_model
from engine.settings import EngineSettings

WRONG = tuple(range(20, 320))
"""Tokens of the output *wrong*."""
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
    parser.add_argument("--rows", type=int, default=None, help="--prompt-lookup-rows of the engine")
    parser.add_argument("--threads", type=int, default=None, help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    parser.add_argument("--outputs", nargs="+", choices=sorted(ALLOWED), default=list(ALLOWED))
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        loop = _loop(Path(directory), asked)
        for output in asked.outputs:
            for batch in asked.batches:
                rows.append(_measure(loop, output, batch, asked))
                print(
                    "{output:>6} batch {batch:>3}: {ratio:.3f} x, {accepted:.0%} of {drafted} drafted accepted".format(**rows[-1])
                )
    result = {
        "machine": describe(),
        "settings": {name: value for name, value in vars(asked).items() if name != "out"},
        "rows": rows,
    }
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def _loop(directory: Path, asked: argparse.Namespace) -> Loop:
    config = SHAPES[asked.shape]
    save_model(random_decoder(config), config, directory, torch.float32)
    settings = EngineSettings(
        model=str(directory), name="lookup", max_total_tokens=32768, prompt_lookup_rows=asked.rows, threads=asked.threads
    )
    return build_loop(settings)


def _measure(loop: Loop, output: str, batch: int, asked: argparse.Namespace) -> dict[str, Any]:
    ratios, speeds = [], []
    before = loop.stats
    for number in range(asked.rounds + 1):
        plain = _speed(loop, output, batch, asked, 0, number)
        drafting = _speed(loop, output, batch, asked, asked.draft_tokens, number)
        if number:  # the first pair warms up
            ratios.append(drafting / plain)
            speeds.append(plain)
    drafted = loop.stats.draft_tokens - before.draft_tokens
    accepted = loop.stats.accepted_draft_tokens - before.accepted_draft_tokens
    return {
        "output": output,
        "batch": batch,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_tokens_per_cpu_second": round(statistics.median(speeds), 1),
        "drafted": drafted,
        "accepted": accepted / drafted if drafted else 0.0,
    }


def _speed(loop: Loop, output: str, batch: int, asked: argparse.Namespace, draft_tokens: int, number: int) -> float:
    """Output tokens for each second of CPU time, of ``batch`` sequences that begin together."""
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
    began, tokens = time.process_time(), batch * int(asked.tokens)
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise RuntimeError(f"The request {reply.id} failed: {reply.message}")
    return tokens / (time.process_time() - began)
