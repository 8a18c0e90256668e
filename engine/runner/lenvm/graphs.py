"""CUDA graphs of the length model's passes that compute candidates only, which are nearly all passes after prompts are computed.

A bucket is a number of parts (:mod:`engine.runner.lenvm.passes`) and their width. Padding parts have an empty prefix: their
candidates, which remain from an earlier pass, attend only to themselves, and their results are not read. Passes that fit no bucket,
or that compute other tokens too, are launched.

Some buckets are also captured for needed candidates only. They are few, because what such a
pass costs depends on its candidates and hardly on its bucket. The
device alone knows how many are needed.

An undecided row needs all of its candidates. A decided row needs its drawn token alone, because the length model must have the keys
and values of every token of the text. The needed branches of all rows are put side by side, those of the first row first, and the
largest product and attention end behind the last one (:mod:`kernels.counted_linear`, :mod:`kernels.branch_attention`). The shapes
stay those of all candidates, so that a CUDA graph can hold the pass, and the numbers are those of the full pass but for rounding.
So the host may choose between the two by how many candidates earlier steps needed (:class:`Needs`): a wrong guess costs time only.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.decoder import DecoderLayer
from yardstick_llm.engine.models.lenvm import LenVM
from yardstick_llm.engine.models.modules import PROJECTIONS, Linear, convert_parts
from yardstick_llm.engine.runner.attention.base import FixedBranches
from yardstick_llm.engine.runner.graphs import Capture, Graphs
from yardstick_llm.engine.runner.lenvm.passes import Kept
from yardstick_llm.kernels.candidates import Candidates
from yardstick_llm.kernels.counted_linear import counted_linear

logger = logging.getLogger(__name__)


COUNTED = "mlp.gate_up_proj"
"""The product that a counted pass computes for needed candidates only: three fifths of a layer's operations. The others are narrow.
On an H100 a counted down_proj of 512 of 1,280 rows took 72 µs, and cuBLAS 53 µs for all rows (docs/benchmarks)."""
LEAST_BRANCHES = 512
"""With fewer candidates the products have so few blocks that most of a GPU waits for the last ones, whatever their number is."""
FEW = 0.5
"""Share of the candidates below which a counted pass is faster. On an H100 with 1,280 candidates :data:`COUNTED` takes as long as
cuBLAS for all rows at a share of 0.69 (docs/benchmarks/gpu-budget.md); the rest is a margin."""
WEIGHT = 1 / 8
"""Weight of the latest step in :class:`Needs`."""


class Needs:
    """Moving average of the share of candidates that the draws of finished steps needed."""

    def __init__(self) -> None:
        self.share = 1.0

    def note(self, needed: int, most: int) -> None:
        """Add a step in which draws with ``most`` candidates together needed ``needed`` of them."""
        self.share += WEIGHT * (needed / most - self.share)

    @property
    def few(self) -> bool:
        """Whether a counted pass is probably the faster one."""
        return self.share < FEW


class Packed(NamedTuple):
    """Needed branches side by side, on the device. Behind them, tokens and positions are 0."""

    tokens: Tensor
    """[branches] int64, with room for all candidates"""
    positions: Tensor
    """[branches] int64"""
    counts: Tensor
    """[parts] int64: needed branches of each part"""
    starts: Tensor
    """[parts] int64: place of the first of them"""
    total: Tensor
    """[1] int64: number of needed branches"""
    branch_of: Tensor
    """[rows, columns] int64: branch of each candidate, or the number of all branches where it is not needed"""


def pack_needed(
    found: Candidates, undecided: Tensor, drawn: Tensor, lengths: Tensor, row_of_part: Tensor, first: Tensor, width: int
) -> Packed:
    """Put the needed branches side by side.

    undecided: [rows] bool; drawn: [rows, 1] int64, column of the token that a decided row draws; lengths: [rows] int64, of the
    texts; row_of_part, first: [parts] int64, row and first column of each part of ``width`` candidates.
    """
    room, column = len(first) * width, torch.arange(found.ids.shape[1], device=found.ids.device)
    undecided_row = undecided.unsqueeze(1)
    needed = torch.where(undecided_row, column < found.counts.unsqueeze(1), column == drawn)
    needs = found.counts.where(undecided, 1)
    ends = needs.cumsum(0)
    begins = ends - needs
    branch_of = (begins.unsqueeze(1) + column * undecided_row).where(needed, room)
    both = torch.zeros((2, room + 1), dtype=torch.int64, device=found.ids.device)  # the last place takes what is not needed
    given = torch.stack([found.ids, lengths.unsqueeze(1).expand_as(found.ids)]).flatten(1)
    both.scatter_(1, branch_of.flatten().expand(2, -1), given)
    return Packed(
        tokens=both[0, :room],
        positions=both[1, :room],
        counts=(needs.index_select(0, row_of_part) - first).clamp(0, width),
        starts=begins.index_select(0, row_of_part) + first,
        total=ends[-1:],
        branch_of=branch_of,
    )


class CountedLinear(nn.Module):
    """A linear layer that computes the first rows only."""

    def __init__(self, like: Linear, count: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self._count = count

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return counted_linear(x, self.weight, self.bias, self._count)


def counted_view(model: LenVM, count: Tensor) -> LenVM | None:
    """``model`` with the same weights, whose layers compute the first ``count`` rows only; the other rows are undefined. None if
    its layers are quantised or have experts.

    count: [1] int64, read when a product is computed.
    """
    layers = model.decoder.layers
    if model.config.experts or not all(type(layer.get_submodule(name)) is Linear for layer in layers for name in PROJECTIONS):
        return None
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    for layer in view.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        convert_parts(layer, {COUNTED: lambda like: CountedLinear(like, count)})
    return view


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
