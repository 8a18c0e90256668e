"""Low-rank additions to a matrix product: ``y += x · Aᵀ · Bᵀ``, with other matrices for each run of rows.

Source: Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", arXiv 2310.18547; here a step's rows are in order of their adapters,
so each adapter has one run of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.linear import linear


class LoraRun(NamedTuple):
    """Rows of one adapter."""

    slot: int
    """Place of the adapter's matrices on the device."""
    begin: int
    """First row, or place of the first row in ``LoraRows.order``."""
    end: int


class LoraRows(NamedTuple):
    """The rows of a product that have an adapter, run after run."""

    runs: tuple[LoraRun, ...]
    order: Tensor | None = None
    """[rows] int64, on the device: the rows of all runs; None: runs are rows as they are."""


class LoraMatrices(NamedTuple):
    """Matrices of one adapter for one product."""

    a: Tensor
    """[parts · rank, inputs]"""
    b: tuple[tuple[int, int, Tensor], ...]
    """Parts of the output: first column, end, and [columns, rank]."""
    rank: int


def add_lora(y: Tensor, x: Tensor, matrices: Sequence[LoraMatrices | None], rows: LoraRows) -> Tensor:
    """Add each run's product with the matrices of its slot to ``y``, in place; return it.

    x: [rows, inputs]; y: [rows, outputs]; matrices: [slot], None where the adapter leaves this product alone.
    """
    for run in rows.runs:
        found = matrices[run.slot]
        if found is None:
            continue
        if rows.order is None:
            _add(y[run.begin : run.end], x[run.begin : run.end], found)
        else:
            picked = rows.order[run.begin : run.end]
            added = y.index_select(0, picked)
            _add(added, x.index_select(0, picked), found)
            y.index_copy_(0, picked, added)
    return y


def _add(y: Tensor, x: Tensor, matrices: LoraMatrices) -> None:
    """Shrink ``x`` to the ranks of all parts in one product, and expand each part onto its columns of ``y``."""
    inner = linear(x, matrices.a)
    for part, (begin, end, b) in enumerate(matrices.b):
        y[:, begin:end].addmm_(inner[:, part * matrices.rank : (part + 1) * matrices.rank], b.t())
