"""CUDA graphs of the length model's passes that compute candidates only, which are nearly all passes after prompts are computed.

A bucket is a number of parts (:mod:`engine.lenvm.parts`) and their width. Padding parts have an empty prefix: their candidates,
which remain from an earlier pass, attend only to themselves, and their results are not read. Passes that fit no bucket, or that
compute other tokens too, are launched.

Some buckets are also captured for needed candidates only (:mod:`engine.lenvm.counted`). They are few, because what such a pass
costs depends on its candidates and hardly on its bucket.
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
from engine.lenvm.counted import LEAST_BRANCHES, Packed, counted_view
from engine.lenvm.kept import Kept
from engine.models.lenvm import LenVM

logger = logging.getLogger(__name__)

PARTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 104, 128, 160, 192, 256)
"""Numbers of parts of the buckets. Beyond the last one, 1,280 candidates, a pass takes longer to compute than to launch, and
padding costs more than a graph saves."""

COUNTED_PARTS = (64, 128, 256, 512, 800)
"""Numbers of parts of the buckets for needed candidates. Padding costs little here, so they also serve passes beyond
:data:`PARTS`."""
MOST_COUNTED = 4096
"""Most candidates of such a bucket, needed or not. Each holds memory: keys and values in :attr:`PassGraphs.kept` and intermediate
results in the graphs' pool, for a length model of 1.5B about 0.4 GB together."""


class PassGraphs:
    """Captured passes that compute raw values, keys and values of candidates, one for each width and number of parts."""

    @torch.inference_mode()
    def __init__(self, model: LenVM, attention: Sequence[FixedBranches], capture: Capture, buckets: Sequence[int] = PARTS) -> None:
        """attention: for each width, with room for the largest of ``buckets``, the numbers of parts, and of :meth:`add_counted`."""
        self._model = model
        self._attention = {each.width: each for each in attention}
        self._sizes = sorted(buckets)
        self._graphs: Graphs[tuple[int, int]] = Graphs(capture)
        self._counted: Graphs[tuple[int, int]] = Graphs(capture)
        self.replayed = 0
        """Number of replayed passes."""
        self.replayed_counted = 0
        """Number of those that computed needed candidates only."""
        start, most, kv = time.monotonic(), max(buckets), attention[0].kv
        widest = max(self._attention)
        self._rows = min(each.most_rows for each in attention)
        self.kept = Kept.room(kv, max(most * widest, min(self._rows * widest, MOST_COUNTED)))
        """Keys and values of the last pass, by branch; valid until the next pass is queued."""
        sizes = (most * widest, most, most)
        tokens, counts, shifts = (torch.zeros(size, dtype=torch.int64, device=kv.keys.device) for size in sizes)
        self._shifted = model.config.vision is not None
        """Whether positions differ from numbers of tokens, behind images."""
        for parts in reversed(self._sizes):
            for width in sorted(self._attention, reverse=True):
                fits = self._attention[width].fill((), parts)
                assert fits, parts
                given = tokens[: parts * width], counts[:parts], *([shifts[:parts]] if self._shifted else [])
                self._graphs.add((parts, width), partial(self._pass, width), *given)
        logger.info(
            "CUDA graphs of the length model: captured for %s parts of %s candidates in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            " or ".join(map(str, self._attention)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    @torch.inference_mode()
    def add_counted(self, buckets: Sequence[int] = COUNTED_PARTS) -> bool:
        """Capture passes over needed candidates too, for those of ``buckets`` for which attention and :attr:`kept` have room. False
        where there is none, or where the model's products cannot be counted."""
        start, device = time.monotonic(), self.kept.keys.device
        total = torch.zeros(1, dtype=torch.int64, device=device)
        model, room = counted_view(self._model, total), self.kept.keys.shape[1]
        sizes = sorted(parts for parts in buckets if parts <= self._rows)
        shapes = [(parts, width) for parts in sizes for width in self._attention if parts * width <= room]
        if model is None or not shapes:
            return False
        inputs = torch.zeros((2, max(parts * width for parts, width in shapes)), dtype=torch.int64, device=device)
        counts, starts = torch.zeros((2, sizes[-1]), dtype=torch.int64, device=device)
        for parts, width in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True):
            fits = self._attention[width].fill((), parts)
            assert fits, parts
            given = (*(each[: parts * width] for each in inputs), counts[:parts], starts[:parts], total)
            self._counted.add((parts, width), partial(self._counted_pass, model, width), *given)
        seconds = time.monotonic() - start
        logger.info("CUDA graphs of the length model: captured for needed candidates of %s parts in %.1f s", sizes, seconds)
        return True

    def counted_bucket(self, prefixes: Sequence[Ints], width: int) -> int | None:
        """Parts that a captured pass over the needed candidates of ``prefixes`` has room for; None where none fits, or where all
        candidates take no longer than needed ones."""
        if len(prefixes) * width < LEAST_BRANCHES or width not in self._attention:
            return None
        sizes = sorted(parts for parts, each in self._counted.buckets if each == width)
        parts = next((size for size in sizes if size >= len(prefixes)), None)
        return parts if parts is not None and self._attention[width].fits(prefixes, parts) else None

    def forward_counted(self, prefixes: Sequence[Ints], width: int, parts: int, packed: Packed) -> Tensor:
        """Raw values of needed candidates of up to ``width`` on each prefix, [branches of ``packed``] float32, valid until the next
        pass is queued, and undefined behind the needed ones. parts: :meth:`counted_bucket`."""
        filled = self._attention[width].fill(prefixes, parts)
        assert filled, "asked before"
        self.replayed += 1
        self.replayed_counted += 1
        missing = parts - len(prefixes)
        # Padding must have no branches: in a packed pass they would be written over those of other rows.
        counts, starts = (torch.nn.functional.pad(each, (0, missing)) for each in (packed.counts, packed.starts))
        raw = self._counted.replay((parts, width), packed.tokens, packed.positions, counts, starts, packed.total)
        return raw[: len(packed.tokens)]

    def forward(
        self, prefixes: Sequence[Ints], width: int, tokens: Tensor, counts: Tensor, shifts: Tensor | None = None
    ) -> Tensor | None:
        """Raw values of ``width`` candidates on each of some prefixes, [parts · width] float32, valid until the next pass is
        queued.

        tokens: [parts · width] int64; counts: [parts] int64, how many of a part's candidates, the first, are real; shifts: [parts]
        int64, positions less numbers of tokens, for a model that reads images. None where no bucket fits.
        """
        parts, attention = self.bucket(len(prefixes)), self._attention.get(width)
        if parts is None or attention is None or not attention.fill(prefixes, parts):
            return None
        self.replayed += 1
        given = (tokens, counts) if shifts is None else (tokens, counts, shifts)
        return self._graphs.replay((parts, width), *given)[: len(tokens)]

    def bucket(self, parts: int) -> int | None:
        """Parts that a captured pass over ``parts`` computes, padding included; None where it is launched."""
        return next((size for size in self._sizes if size >= parts), None)

    def _counted_pass(
        self, model: LenVM, width: int, tokens: Tensor, positions: Tensor, counts: Tensor, starts: Tensor, _total: Tensor
    ) -> Tensor:
        """``_total`` is what ``model`` was made with."""
        attention = self._attention[width].attend(len(counts), counts, starts)
        raw: Tensor = model.head(model(tokens, positions, self.kept.first(len(tokens)).attend(attention)))
        return raw

    def _pass(self, width: int, tokens: Tensor, counts: Tensor, shifts: Tensor | None = None) -> Tensor:
        attention, parts = self._attention[width], len(counts)
        positions = attention.positions(parts)
        if shifts is not None:
            positions = positions + shifts.unsqueeze(1).expand(-1, width).flatten()
        attend = self.kept.first(len(tokens)).attend(attention.attend(parts, counts))
        raw: Tensor = self._model.head(self._model(tokens, positions, attend))
        return raw
