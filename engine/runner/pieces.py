"""CUDA graphs of large steps, in pieces: between two pieces, the attention backend computes one layer's attention.

Attention of a large step is planned for its lengths, so that no graph of a number of tokens can hold it; all other launches depend
on the number of tokens alone. Launching them one by one takes longer than computing them: 14 to 20 ms of the host for 8,160 tokens
of Qwen3-0.6B, which an H100 computes in 15 ms. In pieces the host launches two things a layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import ExtendSegment
from engine.device.cuda_graphs import CapturedPieces, PieceCapture
from engine.models.decoder import Decoder, FusedAttend, Heads

logger = logging.getLogger(__name__)

SIZES = (1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
"""Tokens. Smaller steps are captured whole (:mod:`engine.runner.graphs`); at most a fifth of a step is padding."""
PIECES_BYTES = 2 << 30
"""Memory of some 350 graphs, besides that of their largest step."""


class StepPieces:
    """The decoder's part of a step, from tokens to hidden rows, in pieces, for every one of ``sizes``.

    Steps of no more tokens than ``above`` are left to others.
    """

    @torch.inference_mode()
    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, capture: PieceCapture, sizes: Sequence[int] = SIZES, above: int = 1024
    ) -> None:
        """``attention``: one that reads apart."""
        config, weight = decoder.config, decoder.embed.weight
        self._attention = attention
        self._sizes = sorted(sizes)
        self._above = above
        self.replayed = 0
        """Steps so far."""
        most = max(sizes)
        self._tokens, self._positions = torch.zeros(2, most, dtype=torch.int64, device=weight.device)
        self._slots = torch.full((most,), attention.kv.padding_slot, dtype=torch.int64, device=weight.device)
        heads = most, config.num_heads, config.head_dim
        self._queries, self._attended = torch.zeros(2, *heads, dtype=weight.dtype, device=weight.device).unbind()
        start = time.monotonic()
        self._pieces: dict[int, CapturedPieces] = {}
        for size in reversed(self._sizes):
            self._pieces[size] = capture.in_pieces(partial(self._compute, decoder, size))
        logger.info(
            "CUDA graphs in pieces: captured for %s tokens in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """tokens, positions: [tokens] int64, those of ``segments``. -> [tokens, hidden], valid until the next step is queued.

        None for other numbers of tokens.
        """
        count = len(tokens)
        if count <= self._above:
            return None
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        reading = self._attention.plan_reading(segments)
        for place, values in ((self._tokens, tokens), (self._positions, positions), (self._slots, reading.slots)):
            place[:count].copy_(values, non_blocking=True)
        self._slots[count:size].fill_(self._attention.kv.padding_slot)
        queries, attended = self._queries[:count], self._attended[:count]
        *replays, last = self._pieces[size].replays
        for layer, replay in enumerate(replays):
            replay()
            reading.read(layer, queries, attended)
        last()
        self.replayed += 1
        return self._pieces[size].output[:count]

    def _compute(self, decoder: Decoder, size: int, cut: Callable[[], None]) -> Tensor:
        """The work of a step of ``size`` tokens without attention; ``cut`` stands in its place."""

        def attend(layer: int, heads: Heads) -> Tensor:
            self._attention.write(layer, heads, self._slots[:size], self._queries[:size])
            cut()
            return self._attended[:size]

        output: Tensor = decoder(self._tokens[:size], self._positions[:size], FusedAttend(attend))
        return output
