"""CUDA graphs of small steps: the launches of a step are captured once, at the start, and replayed together.

A graph repeats the same launches on the same addresses, so each is captured for a *bucket*, a number of tokens, and smaller steps
are padded to it. The inputs of a step lie in tensors that never move, filled by copies in the same stream, so a step may be
queued while the one before still runs. Steps that fit no bucket are launched kernel by kernel.

An engine with LoRA adapters has two graphs for each bucket, so that steps of the base model alone do no work for adapters.

Attention inside graphs is always the Triton backend's. Its tables are plain tensors that can be padded. FlashInfer keeps the plan
of a step in a pinned buffer of its own, which a second step in flight would overwrite, and fixes the rows as well as the tokens.
"""

from __future__ import annotations

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

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 800, 896, 1024, 1280, 1536, 1792, 2048)
"""Tokens. Beyond the last, computing a step takes longer than launching it."""


class FixedAttention(Protocol):
    """Attention from tables of fixed address, so that a CUDA graph can capture it."""

    def attend(self, tokens: int) -> Attend:
        """Attention of a step of ``tokens``, as :meth:`fill` last described it."""

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> bool:
        """Queue the tables of ``segments``, padded to ``tokens``; False where they do not fit. Padding is written to the padding
        slot and never read.
        """


class Bucket(NamedTuple):
    """Sizes that a graph is captured for."""

    tokens: int
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
    ) -> None:
        """``adapters``: None in an engine without adapters."""
        self._attention = attention
        self._adapters = adapters
        self._sizes = sorted(buckets)
        self._graphs: Graphs[Bucket] = Graphs(capture)
        self.replayed = 0
        """Steps so far."""
        start = time.monotonic()
        tokens, positions = torch.zeros(2, max(buckets), dtype=torch.int64, device=decoder.embed.weight.device)
        for size in reversed(self._sizes):
            fits = attention.fill((), size)
            assert fits, size
            attend = attention.attend(size)
            for adapted in (False,) if adapters is None else (False, True):
                with adapters.captured(size) if adapters is not None and adapted else nullcontext():
                    self._graphs.add(Bucket(size, adapted), partial(decoder, attend=attend), tokens[:size], positions[:size])
        logger.info(
            "CUDA graphs: captured for %s tokens in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """tokens, positions: [tokens] int64, those of ``segments``. -> [tokens, hidden], valid until the next step is queued.

        None where no bucket fits.
        """
        size = next((size for size in self._sizes if size >= len(tokens)), None)
        if size is None or not self._attention.fill(segments, size):
            return None
        adapted = self._adapters is not None and self._adapters.active
        if self._adapters is not None and adapted:
            self._adapters.fill(size)
        self.replayed += 1
        return self._graphs.replay(Bucket(size, adapted), tokens, positions)[: len(tokens)]
