"""Passes over the needed candidates only, whose number the device alone knows.

An undecided row needs all of its candidates. A decided row needs its drawn token alone, because the length model must have the keys
and values of every token of the text. The needed branches of all rows are put side by side, those of the first row first, and the
largest product and attention end behind the last one (:mod:`kernels.counted_linear`, :mod:`kernels.branch_attention`). The shapes
stay those of all candidates, so that a CUDA graph can hold the pass, and the numbers are those of the full pass but for rounding.
So the host may choose between the two by how many candidates earlier steps needed (:class:`Needs`): a wrong guess costs time only.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.conversion import PROJECTIONS, convert
from engine.models.decoder import DecoderLayer
from engine.models.lenvm import LenVM
from engine.models.modules import Linear
from kernels.candidates import Candidates
from kernels.counted_linear import counted_linear

COUNTED = "mlp.gate_up_proj"
"""The product that a counted pass computes for needed candidates only: three fifths of a layer's operations. The others are narrow.
On an H100 a counted down_proj of 512 of 1,280 rows took 72 µs, and cuBLAS 53 µs for all rows (docs/benchmarks)."""
LEAST_BRANCHES = 512
"""With fewer candidates the products have so few blocks that most of a GPU waits for the last ones, whatever their number is."""
FEW = 0.5
"""Share of the candidates below which a counted pass is faster. On an H100 with 1,280 candidates :data:`COUNTED` takes as long as
cuBLAS for all rows at a share of 0.69 (docs/gpu-budget.md); the rest is a margin."""
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


def pack(
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
        convert(layer, {COUNTED: lambda like: CountedLinear(like, count)})
    return view
