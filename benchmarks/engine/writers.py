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
from benchmarks.engine.subject import random_decoder, randomise
from engine import wire
from engine.build import PairedLenVM, assemble
from engine.loop import Loop
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lenvm import LenVM
from engine.settings import EngineSettings

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
        self,
        decoder: Decoder,
        length: PairedLenVM | None,
        dtype: str,
        *,
        slots: int | None,
        rows: int,
        kv_dtype: str = "auto",
        max_batched_tokens: int | None = None,
    ) -> None:
        """``slots``: None for as many as memory allows. ``rows``: largest number of texts at a time."""
        settings = EngineSettings(
            model="bench",
            name="bench",
            dtype=dtype,
            max_total_tokens=slots,
            max_running_requests=rows,
            max_wait_seconds=3600,  # no request is refused, however slow the machine
            max_waiting=max(4096, rows),
            kv_dtype=kv_dtype,
            max_batched_tokens=max_batched_tokens,
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


def mixed(writer: Writer, writing: Writing) -> wire.Sampling:
    """Return sampling with ``min_p`` at the temperature that leaves some :data:`MIX_SURVIVORS` candidates a draw of texts like
    ``writing``."""
    rng, few = np.random.default_rng(9), min(8, writer.rows)
    for temperature in TEMPERATURES:
        mix = wire.Sampling(min_p=MIX_MIN_P, temperature=temperature, ignore_eos=True)
        if survivors(writer, replace(writing, sampling=mix, rows=few, output=16), rng) <= MIX_SURVIVORS * 1.15:
            break
    return mix


def guided_flops_ratio(base: ModelConfig, length: ModelConfig, context: float, candidates: float = CANDIDATES) -> float:
    """Matrix products and attention of a guided token, as a multiple of a plain one's; ``context``: tokens before it.

    The value head is a square matrix and a row. What is adopted is not computed again.
    """
    plain = flops(base, Work(tokens=1, pairs=round(context + 1), rows=1, context=0))
    layers = flops(length, Work(tokens=1, pairs=round(context + 1), rows=0, context=0))
    head = 2 * (length.hidden_size**2 + length.hidden_size)
    return 1 + candidates * (layers + head) / plain


def random_pair(base: ModelConfig, length: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, PairedLenVM]:
    """Random weights on ``device``. gamma is that of published checkpoints."""
    decoder = random_decoder(base, dtype=dtype, device=device)
    with device:
        model = LenVM(length, dtype)
    randomise(model)
    return decoder, PairedLenVM(model.eval(), 0.997)
