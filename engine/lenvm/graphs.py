"""CUDA graphs of the length model's passes that compute candidates only, which are nearly all passes after prompts are computed.

A bucket is a number of parts (:mod:`engine.lenvm.parts`) and their width. Padding parts have an empty prefix: their candidates,
which remain from an earlier pass, attend only to themselves, and their results are not read. Passes that fit no bucket, or that
compute other tokens too, are launched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.attention.branches import FixedBranches
from engine.device.cuda_graphs import Capture, Graphs
from engine.ints import Ints
from engine.lenvm.kept import Kept
from engine.models.lenvm import LenVM

logger = logging.getLogger(__name__)

PARTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 104, 128, 160, 192, 256)
"""Numbers of parts of the buckets. Beyond the last one, 1,280 candidates, a pass takes longer to compute than to launch, and
padding costs more than a graph saves."""


class PassGraphs:
    """Captured passes that compute raw values, keys and values of candidates, one for each width and number of parts."""

    @torch.inference_mode()
    def __init__(self, model: LenVM, attention: Sequence[FixedBranches], capture: Capture, buckets: Sequence[int] = PARTS) -> None:
        """attention: for each width, with room for the largest of ``buckets``, the numbers of parts."""
        self._model = model
        self._attention = {each.width: each for each in attention}
        self._sizes = sorted(buckets)
        self._graphs: Graphs[tuple[int, int]] = Graphs(capture)
        self.replayed = 0
        """Number of replayed passes."""
        start, most, kv = time.monotonic(), max(buckets), attention[0].kv
        widest = max(self._attention)
        self.kept = Kept.room(kv, most * widest)
        """Keys and values of the last pass, by branch; valid until the next pass is queued."""
        tokens, counts = (torch.zeros(size, dtype=torch.int64, device=kv.keys.device) for size in (most * widest, most))
        for parts in reversed(self._sizes):
            for width in sorted(self._attention, reverse=True):
                fits = self._attention[width].fill((), parts)
                assert fits, parts
                self._graphs.add((parts, width), partial(self._pass, width), tokens[: parts * width], counts[:parts])
        logger.info(
            "CUDA graphs of the length model: captured for %s parts of %s candidates in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            " or ".join(map(str, self._attention)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, prefixes: Sequence[Ints], width: int, tokens: Tensor, counts: Tensor) -> Tensor | None:
        """Raw values of ``width`` candidates on each of some prefixes, [parts · width] float32, valid until the next pass is
        queued.

        tokens: [parts · width] int64; counts: [parts] int64, how many of a part's candidates, the first, are real. None where no
        bucket fits.
        """
        parts, attention = self.bucket(len(prefixes)), self._attention.get(width)
        if parts is None or attention is None or not attention.fill(prefixes, parts):
            return None
        self.replayed += 1
        return self._graphs.replay((parts, width), tokens, counts)[: len(tokens)]

    def bucket(self, parts: int) -> int | None:
        """Parts that a captured pass over ``parts`` computes, padding included; None where it is launched."""
        return next((size for size in self._sizes if size >= parts), None)

    def _pass(self, width: int, tokens: Tensor, counts: Tensor) -> Tensor:
        attention, parts = self._attention[width], len(counts)
        attend = self.kept.first(len(tokens)).attend(attention.attend(parts, counts))
        raw: Tensor = self._model.head(self._model(tokens, attention.positions(parts), attend))
        return raw
