"""Cost of LoRA adapters in a step of 43 items: ``python -m benchmarks.engine.lora``.

The same requests, with an adapter each and with none, in turn in one process: 43 items of different tokens in 16 requests, one for
each adapter. Nothing is found in the prefix cache. ``--shape`` is a random model of that shape with ``--layers`` layers, which all
cost the same. The ratio is that of the process's CPU time, which other processes change less than the time on the clock, and on a
GPU that of the time on the clock. One JSON line comes last, with machine and commit.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.engine.machine import describe
from benchmarks.engine.subject import SHAPES, random_decoder
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.lora.layout import Layout
from engine.models.config import load_config
from engine.models.loader import save_model
from engine.models.source import locate
from engine.settings import EngineSettings

ITEMS, ITEM_TOKENS, QUERY_TOKENS = 43, 180, 120
VOCABULARY = 32_000
"""Vocabulary of the random model; a score multiplies only the rows of its labels."""
MAX_WAIT_SECONDS = 3600.0
"""Long enough that no request is refused, even on a slow machine."""


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model")
    model.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=4, help="of the random model")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        directory = (
            locate(given.model) if given.model else _random_model(Path(root) / f"{given.shape}-{given.layers}-layers", given)
        )
        lora = [f"a{seed}={_write(Path(root) / str(seed), directory, given.rank, seed)}" for seed in range(given.adapters)]
        settings = EngineSettings(
            model=str(directory), name="model", lora=lora, max_loras_device=given.adapters, max_lora_rank=given.rank,
            max_batched_tokens=8192, max_total_tokens=16384, threads=given.threads,
            max_wait_seconds=MAX_WAIT_SECONDS,
        )  # fmt: skip
        loop = build_loop(settings)
        digests = [adapter.digest for adapter in loop.adapters.description.adapters]
        rng = random.Random(0)
        _seconds(loop, rng, digests, [""] * given.adapters)
        _seconds(loop, rng, digests, digests)
        pairs = []
        for number in range(given.pairs):
            order = (True, False) if number % 2 else (False, True)
            taken = {adapted: _seconds(loop, rng, digests, digests if adapted else [""] * len(digests)) for adapted in order}
            pairs.append((taken[False], taken[True]))
    on_gpu = torch.cuda.is_available()
    ratios = [adapted.clock / base.clock if on_gpu else adapted.cpu / base.cpu for base, adapted in pairs]
    result = {
        "base_seconds": median(base.clock for base, _ in pairs),
        "adapted_seconds": median(adapted.clock for _, adapted in pairs),
        "base_cpu_seconds": median(base.cpu for base, _ in pairs),
        "adapted_cpu_seconds": median(adapted.cpu for _, adapted in pairs),
        "ratio": median(ratios),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
        "clock_ratios": [round(ratio, 4) for ratio in sorted(adapted.clock / base.clock for base, adapted in pairs)],
        "items": ITEMS,
        "adapters": given.adapters,
        "rank": given.rank,
        "model": directory.name,
    }
    result["machine"] = describe()
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


class _Taken(NamedTuple):
    """Seconds."""

    clock: float
    cpu: float


def _random_model(directory: Path, given: argparse.Namespace) -> Path:
    config = replace(SHAPES[given.shape], num_layers=given.layers, vocab_size=VOCABULARY)
    save_model(random_decoder(config), config, directory, torch.float32)
    return directory


def _seconds(loop: Loop, rng: random.Random, all_digests: Sequence[str], digests: Sequence[str]) -> _Taken:
    """Time of all requests, one for each of ``digests``, whose items add up to :data:`ITEMS`. Raises RuntimeError if one fails."""
    count, vocabulary = len(all_digests), loop.info.vocab_size
    for index, digest in enumerate(digests):
        items = ITEMS // count + (index < ITEMS % count)
        prefix, *branches = (
            [rng.randrange(3, vocabulary) for _ in range(length)] for length in (QUERY_TOKENS, *[ITEM_TOKENS] * items)
        )
        loop.submit(wire.Score(str(index), prefix, branches, wire.Labels([1, 2]), adapter=digest))
    began = _Taken(time.perf_counter(), time.process_time())
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise RuntimeError(f"The request {reply.id} failed: {reply.message}")
    return _Taken(time.perf_counter() - began.clock, time.process_time() - began.cpu)


def _write(directory: Path, model: Path, rank: int, seed: int) -> Path:
    """Write an adapter of all projections with random weights."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for product in Layout(load_config(model)).products:
        for part in product.parts:
            name = f"base_model.model.model.layers.{product.layer}.{part.name}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, product.inputs, generator=generator) * product.inputs**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(part.outputs, rank, generator=generator) * 0.01
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return directory


if __name__ == "__main__":
    raise SystemExit(main())
