"""Cost of LoRA adapters in a step of 43 items on a CPU: ``python -m benchmarks.engine.lora``.

The same requests, with an adapter each and with none, in turn in one process: 43 items of different tokens in 16 requests, one for
each adapter. Nothing is found in the prefix cache. One JSON line comes last, with machine and commit.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from benchmarks.engine.machine import describe
from engine import wire
from engine.build import build_loop
from engine.loop import Loop
from engine.lora.layout import Layout
from engine.models.config import load_config
from engine.models.source import locate
from engine.settings import EngineSettings

ITEMS, ITEM_TOKENS, QUERY_TOKENS = 43, 180, 120
MAX_WAIT_SECONDS = 3600.0
"""So long that no request is refused, also on a slow machine."""


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    directory = locate(given.model)
    with tempfile.TemporaryDirectory() as root:
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
    ratios = [adapted / base for base, adapted in pairs]
    result = {
        "base_seconds": median(base for base, _ in pairs),
        "adapted_seconds": median(adapted for _, adapted in pairs),
        "ratio": median(ratios),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
        "items": ITEMS,
        "adapters": given.adapters,
        "rank": given.rank,
        "model": directory.name,
    }
    print(json.dumps(result | {"machine": describe()}))
    return 0


def _seconds(loop: Loop, rng: random.Random, all_digests: Sequence[str], digests: Sequence[str]) -> float:
    """Time of all requests, one for each of ``digests``, whose items add up to :data:`ITEMS`. Raises RuntimeError if one fails."""
    count, vocabulary = len(all_digests), loop.info.vocab_size
    for index, digest in enumerate(digests):
        items = ITEMS // count + (index < ITEMS % count)
        prefix, *branches = (
            [rng.randrange(3, vocabulary) for _ in range(length)] for length in (QUERY_TOKENS, *[ITEM_TOKENS] * items)
        )
        loop.submit(wire.Score(str(index), prefix, branches, wire.Labels([1, 2]), adapter=digest))
    began = time.perf_counter()
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise RuntimeError(f"The request {reply.id} failed: {reply.message}")
    return time.perf_counter() - began


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
