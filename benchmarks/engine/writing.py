"""Loads of generations, with a base model and, for guided texts, a length model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.engine.engines import Engine
from benchmarks.engine.subject import QWEN25_7B, QWEN25_15B, default_device, random_decoder, randomise
from examples.demo_models.lenvm import GAMMA
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.loop.build import PairedLenVM
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.lenvm import LenVM, load_lenvm
from yardstick_llm.engine.models.loader import load_model

CANDIDATES = 5
GUIDED = wire.LengthGuidance(scale=1.0, top_k=CANDIDATES)
"""Guidance in which every draw has this number of candidates, unless ``min_p`` removes some."""
PLAIN = wire.Sampling(ignore_eos=True)
"""Sampling as a request without options has it. Guidance keeps its own ``top_k`` of the same distribution."""
MIX_MIN_P = 0.01
MIX_SURVIVORS = 2.0
TEMPERATURES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01)
"""Temperatures, the highest first; the first that leaves few enough candidates is used."""


@dataclass(frozen=True)
class Pair:
    """A measured model, and the length model if texts are guided."""

    decoder: Decoder
    length: PairedLenVM | None
    dtype: str

    def engine(self, slots: int | None, rows: int, **options: Any) -> Engine:
        """Return an engine for ``rows`` texts at a time. ``slots``: None for as many as memory allows."""
        most: dict[str, Any] = {"max_total_tokens": slots, "max_running_requests": rows}
        return Engine(self.decoder, self.dtype, self.length, **most, **options)


def load_pair(shape: str) -> Pair:
    """Load the demo models (``demo``) or random weights in the published shapes (``7b``), on a GPU if there is one."""
    device = default_device()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    if shape == "7b":
        return random_pair(QWEN25_7B, QWEN25_15B, device, dtype)
    decoder = load_model(MODELS / "base", getattr(torch, dtype)).to(device).eval()
    model = load_lenvm(MODELS / "lenvm", getattr(torch, dtype)).to(device).eval()
    return Pair(decoder, PairedLenVM(model, GAMMA), dtype)


def random_pair(base: ModelConfig, length: ModelConfig, device: torch.device, dtype: str) -> Pair:
    """Random weights on ``device``. gamma is that of published checkpoints."""
    decoder = random_decoder(base, dtype=getattr(torch, dtype), device=device)
    with device:
        model = LenVM(length, getattr(torch, dtype))
    randomise(model)
    return Pair(decoder, PairedLenVM(model.eval(), 0.997), dtype)


@dataclass(frozen=True)
class Writing:
    """A load: a number of texts of fixed lengths at once."""

    rows: int
    prompt: int
    output: int
    sampling: wire.Sampling = PLAIN

    def requests(self, rng: np.random.Generator, vocab_size: int, guided: Iterable[bool], **extra: Any) -> list[wire.Generate]:
        """Return one request per text, with random prompts; ``guided``: whether each text is guided."""
        return [
            wire.Generate(
                f"{rng.integers(1 << 62)}-{row}",
                rng.integers(0, vocab_size, self.prompt).tolist(),
                msgspec.structs.replace(self.sampling, max_tokens=self.output, seed=int(rng.integers(1 << 62))),
                length_guidance=GUIDED if steered else None,
                **extra,
            )
            for row, steered in zip(range(self.rows), guided, strict=False)
        ]


def step_seconds(engine: Engine, requests: Sequence[wire.Generate]) -> float:
    """Return the mean wall time of a decoding step that gives every text a token, after all texts have begun."""
    for request in requests:
        engine.loop.submit(request)
    waiting, start, tokens = {request.id for request in requests}, time.perf_counter(), 0
    while not engine.loop.idle:
        for reply in engine.loop.step():
            assert isinstance(reply, wire.Delta), reply
            waiting.discard(reply.id)
            tokens += len(reply.tokens)
        if waiting:
            start, tokens = time.perf_counter(), 0
    return (time.perf_counter() - start) * len(requests) / tokens


def survivors(engine: Engine, writing: Writing, rng: np.random.Generator) -> float:
    """Return the mean number of candidates of a draw."""
    requests = writing.requests(rng, engine.loop.info.vocab_size, repeat(True), logprobs=CANDIDATES)
    deltas = [reply for reply in engine.run(requests) if isinstance(reply, wire.Delta)]
    return statistics.mean(len(row) for delta in deltas if delta.logprobs for row in delta.logprobs.top)


def mixed(engine: Engine, writing: Writing) -> wire.Sampling:
    """Return sampling with ``min_p`` at the temperature that leaves some :data:`MIX_SURVIVORS` candidates a draw of texts like
    ``writing``."""
    rng, few = np.random.default_rng(9), min(8, writing.rows)
    for temperature in TEMPERATURES:
        mix = wire.Sampling(min_p=MIX_MIN_P, temperature=temperature, ignore_eos=True)
        if survivors(engine, replace(writing, sampling=mix, rows=few, output=16), rng) <= MIX_SURVIVORS * 1.15:
            break
    return mix
