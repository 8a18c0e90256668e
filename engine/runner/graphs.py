"""CUDA graphs of steps: the launches of a step are captured once, at the start, and replayed together.

A graph repeats the same launches on the same addresses, so each is captured for a *bucket*, a number of tokens, and smaller steps
are padded to it. The inputs of a step lie in tensors that never move, filled by copies in the same stream, so a step may be
queued while the one before still runs. Steps that fit no bucket are launched kernel by kernel.

Small steps are captured whole, with the Triton backend's attention. Large ones (:data:`LARGE_BUCKETS`) are captured up to the last
layer's attention, with the attention of the engine's backend; the rest of the last layer is launched for the rows that are read,
which are few. Launching a large step takes longer than computing it: 14 to 20 ms of the host for 8,160 tokens of Qwen3-0.6B, which
an H100 computes in 15 ms.

An engine with LoRA adapters has two graphs for each bucket, so that steps of the base model alone do no work for adapters.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.batch import ExtendSegment
from engine.device.cuda_graphs import Capture, Graphs
from engine.lora.captured import CapturedRows
from engine.models.decoder import Attend, Decoder

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 800, 896, 1024)
"""Tokens of steps that are captured whole."""
LARGE_BUCKETS = (1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384)
"""Tokens of larger steps; at most a fifth of a step is padding."""
GRAPH_BYTES = 16 << 20
"""Memory of a large graph itself, besides the tensors that all share."""


class FixedAttention(Protocol):
    """Attention from tables of fixed address, so that a CUDA graph can capture it."""

    layouts: int
    """Number of layouts of the tables. A graph is captured for each."""

    def attend(self, tokens: int, layout: int = 0) -> Attend:
        """Attention of a step of ``tokens``, as :meth:`fill` last described it in ``layout``; until then all are padding."""

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int | None:
        """Queue the tables of ``segments``, padded to ``tokens``, and return their layout; None where they fit none. Padding is
        written to the padding slot and never read.
        """


class Bucket(NamedTuple):
    """Sizes that a graph is captured for."""

    tokens: int
    layout: int
    adapted: bool
    """Whether requests have adapters."""


class StepGraphs:
    """The decoder's part of a step, from tokens to hidden rows, captured for every one of ``buckets``."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        attention: FixedAttention,
        capture: Capture,
        buckets: Sequence[int] = BUCKETS,
        adapters: CapturedRows | None = None,
        *,
        above: int = 0,
        whole: bool = True,
    ) -> None:
        """``adapters``: None in an engine without adapters. ``above``: steps of no more tokens are left to others. ``whole``:
        capture all of the last layer; otherwise launch what follows its attention, for the rows that are read.
        """
        self._decoder = decoder
        self._attention = attention
        self._adapters = adapters
        self._sizes = sorted(buckets)
        self._above = above
        self._graphs: Graphs[Bucket] = Graphs(capture)
        self.replayed = 0
        """Steps so far."""
        start = time.monotonic()
        weight = decoder.embed.weight
        tokens, positions = torch.zeros(2, max(buckets), dtype=torch.int64, device=weight.device)
        self._residual = None if whole else torch.empty(max(buckets), weight.shape[1], dtype=weight.dtype, device=weight.device)
        for size, layout in itertools.product(reversed(self._sizes), range(attention.layouts)):
            attend = attention.attend(size, layout)
            for adapted in (False,) if adapters is None else (False, True):
                with adapters.captured(size) if adapters is not None and adapted else nullcontext():
                    self._graphs.add(Bucket(size, layout, adapted), partial(self._compute, attend), tokens[:size], positions[:size])
        logger.info(
            "CUDA graphs: captured for %s tokens in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment], rows: Tensor) -> Tensor | None:
        """tokens, positions: [tokens] int64, those of ``segments``; rows: [rows] int64, of the tokens. -> [rows, hidden], valid
        until the next step is queued.

        None where no bucket fits.
        """
        count = len(tokens)
        size = next((size for size in self._sizes if size >= count), None)
        layout = None if size is None or count <= self._above else self._attention.fill(segments, size)
        if size is None or layout is None:
            return None
        adapted = self._adapters is not None and self._adapters.active
        if self._adapters is not None and adapted:
            self._adapters.fill(size)
        self.replayed += 1
        found = self._graphs.replay(Bucket(size, layout, adapted), tokens, positions)[:count]
        if self._residual is None:
            return found.index_select(0, rows)
        if not len(rows):
            return self._residual[:0]
        residual = self._residual[:count]
        if len(rows) < count:
            return self._decoder.from_last_attention(found, residual, rows)
        return self._decoder.from_last_attention(found, residual).index_select(0, rows)

    def _compute(self, attend: Attend, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden rows, [tokens, hidden], or the output of the last layer's attention, [tokens, heads · head_dim]."""
        if self._residual is None:
            return self._decoder(tokens, positions, attend)  # type: ignore[no-any-return]
        attended, residual = self._decoder.to_last_attention(tokens, positions, attend)
        self._residual[: len(tokens)].copy_(residual)
        return attended
