"""Generation in this process: the engine's loop with a base model and, for guided texts, a length model."""

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

from benchmarks.engine.roofline import Work, flops
from benchmarks.engine.subject import SMALL
from engine import wire
from engine.build import PairedLenVM, assemble
from engine.loop import Loop
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lenvm import LenVM
from engine.models.rope import Rope
from engine.settings import EngineSettings

CANDIDATES = 5
GUIDED = wire.LengthGuidance(scale=1.0, top_k=CANDIDATES)
"""Guidance in which every draw has this number of candidates, unless ``min_p`` removes some."""
PLAIN = wire.Sampling(top_k=CANDIDATES, ignore_eos=True)

QWEN25_7B = replace(
    SMALL,
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_context=32_768,
    rope=Rope(1_000_000.0),
    tied=False,
    qk_norm=False,
    qkv_bias=True,
)
QWEN25_15B = replace(QWEN25_7B, hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2, tied=True)
"""Shape of the published measurements; the length model has the base model's vocabulary."""


@dataclass(frozen=True)
class Writing:
    """A load: a number of texts of fixed lengths at once."""

    rows: int
    prompt: int
    output: int
    sampling: wire.Sampling = PLAIN

    def requests(self, rng: np.random.Generator, vocab_size: int, guided: Iterable[bool], **extra: Any) -> list[wire.Generate]:
        """Yield one request per text, with random prompts; ``guided``: whether each text is guided."""
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


class Writer:
    """The loop, driven in this process."""

    def __init__(
        self, decoder: Decoder, length: PairedLenVM | None, dtype: str, *, slots: int, rows: int, cuda_graphs: str = "auto"
    ) -> None:
        """``rows``: largest number of texts at a time."""
        settings = EngineSettings(
            model="bench",
            name="bench",
            dtype=dtype,
            max_total_tokens=slots,
            max_running_requests=rows,
            max_wait_seconds=3600,  # no request is refused, however slow the machine
            cuda_graphs=cuda_graphs,
        )
        self.loop: Loop = assemble(decoder, settings, "bench", length)
        self.vocab_size = self.loop.info.vocab_size
        self.rows = rows

    def write(self, requests: Sequence[wire.Generate]) -> dict[str, list[wire.Delta]]:
        """Run all requests to their end; return the deltas of each."""
        return self._run(requests)[0]

    def step_seconds(self, requests: Sequence[wire.Generate]) -> float:
        """Return the mean wall time of a decoding step that gives every text a token, after all texts have begun."""
        _, seconds, tokens = self._run(requests)
        return seconds * len(requests) / tokens

    def _run(self, requests: Sequence[wire.Generate]) -> tuple[dict[str, list[wire.Delta]], float, int]:
        """Return the deltas of each request, the seconds since all had begun, and the tokens received in that time."""
        replies: dict[str, list[wire.Delta]] = {request.id: [] for request in requests}
        for request in requests:
            self.loop.submit(request)
        waiting, start, tokens = len(requests), time.perf_counter(), 0
        while not self.loop.idle:
            for reply in self.loop.step():
                assert isinstance(reply, wire.Delta), reply
                waiting -= not replies[reply.id]
                replies[reply.id].append(reply)
                tokens += len(reply.tokens)
            if waiting > 0:
                start, tokens = time.perf_counter(), 0
        return replies, time.perf_counter() - start, tokens


def survivors(writer: Writer, writing: Writing, rng: np.random.Generator) -> float:
    """Return the mean number of candidates of a draw."""
    requests = writing.requests(rng, writer.vocab_size, repeat(True), logprobs=CANDIDATES)
    tops = [delta.logprobs.top for deltas in writer.write(requests).values() for delta in deltas if delta.logprobs]
    return statistics.mean(len(row) for top in tops for row in top)


def guided_flops_ratio(base: ModelConfig, length: ModelConfig, context: float, candidates: float = CANDIDATES) -> float:
    """Matrix products and attention of a guided token, as a multiple of a plain one's; ``context``: tokens before it.

    The value head is a square matrix and a row. What is adopted is not computed again.
    """
    plain = flops(base, Work(tokens=1, pairs=round(context + 1), rows=1, context=0))
    layers = flops(length, Work(tokens=1, pairs=round(context + 1), rows=0, context=0))
    head = 2 * (length.hidden_size**2 + length.hidden_size)
    return 1 + candidates * (layers + head) / plain


def random_pair(base: ModelConfig, length: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, PairedLenVM]:
    """Random weights on ``device``, scaled so that activations stay near one. gamma is that of published checkpoints."""
    torch.manual_seed(0)
    with device:
        decoder, model = Decoder(base, dtype), LenVM(length, dtype)
    with torch.no_grad():
        for name, parameter in (*decoder.named_parameters(), *model.named_parameters()):
            if parameter.dim() == 2:
                parameter.normal_(std=0.05 if "embed" in name else parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()
    return decoder.eval(), PairedLenVM(model.eval(), 0.997)
