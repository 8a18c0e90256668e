"""Arguments of all kernels of LoRA adapters: the rows of each adapter in a step, and the places of its matrices on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

ALIGNMENT = 16
"""Numbers: the matrices of a product begin at multiples of it, and slots are multiples of it apart."""
RANK_ALIGNMENT = 8
"""Ranks are multiples of it, padded with zeros, so that kernels load 16 bytes of a row of B in 16-bit dtypes."""
MOST_PARTS = 3
ROW_BLOCKS = 16, 64
"""Rows of a block: where runs, and rows without an adapter, have :data:`FEW_ROWS` or fewer on average, and where they have more."""
FEW_ROWS = 32
NO_ADAPTER = -1
"""Slot of rows without an adapter."""


class LoraRun(NamedTuple):
    """Rows of one adapter."""

    slot: int
    """Place of the adapter's matrices on the device."""
    begin: int
    """First row, or place of the first row in ``LoraRows.order``."""
    end: int


class LoraRows(NamedTuple):
    """The rows of a product, run after run."""

    runs: tuple[LoraRun, ...]
    """In order. Rows outside of them have no adapter."""
    blocks: Tensor
    """[3 · blocks] int64, on the device: slot, first row and end of each block, from :func:`block_runs`. Each row is in one block.
    A block of zeros does nothing, so that tables of fixed size can be padded."""
    size: int
    """Most rows of a block; one of :data:`ROW_BLOCKS`."""
    order: Tensor | None = None
    """[rows] int64, on the device: the rows, adapter after adapter; None: they are in this order as they are."""
    most_rank: int | None = None
    """The largest rank of a captured launch, which is replayed with other ``blocks``; None otherwise. ``runs`` is not read then."""


class LoraMatrices(NamedTuple):
    """Matrices of one adapter for one product."""

    a: Tensor
    """[parts · rank, inputs]"""
    b: tuple[tuple[int, int, Tensor], ...]
    """Parts of the output: first column, end, and [columns, rank]."""
    rank: int


class LoraProduct(NamedTuple):
    """The additions of the adapters on the device to one product."""

    matrices: Sequence[LoraMatrices | None]
    """[slot], None where the adapter leaves this product alone. Views of ``weights``."""
    weights: Tensor
    """[slots, numbers]. A product's matrix A, [parts · rank, inputs], is followed by its matrix B, [outputs, rank]."""
    table: Tensor
    """[slots, 2, products] int64, on the device: where the matrices of each product begin in their slot, and their rank or 0."""
    number: int
    """Number of the product in ``table``."""
    inputs: int
    parts: tuple[int, ...]
    """Columns of each part of the output."""


class LoraDelta(NamedTuple):
    """Additions to a product that are not made yet: its input shrunk to the ranks, and what expands it."""

    inner: Tensor
    """[rows, parts · largest rank]: in its first columns, the row's parts of its adapter's rank side by side."""
    product: LoraProduct
    rows: LoraRows


def padded_rank(rank: int) -> int:
    """``rank`` rounded up to a multiple of :data:`RANK_ALIGNMENT`."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT


def block_runs(runs: Sequence[LoraRun], rows: int, size: int | None = None) -> tuple[npt.NDArray[np.int64], int]:
    """Cut ``rows`` rows into blocks: :attr:`LoraRows.blocks` on the host as [blocks, 3], and :attr:`LoraRows.size`.

    ``size``: of the blocks; None for the one that suits the rows.
    """
    pieces, begin = [], 0
    for run in (*runs, LoraRun(NO_ADAPTER, rows, rows)):
        pieces += [LoraRun(NO_ADAPTER, begin, run.begin), run]
        begin = run.end
    size = size or ROW_BLOCKS[rows > FEW_ROWS * sum(piece.begin < piece.end for piece in pieces)]
    slots, begins, ends = np.array(pieces, np.int64).T
    counts = -(-(ends - begins) // size)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(begins, counts) + size * (np.arange(counts.sum()) - before)
    return np.stack([np.repeat(slots, counts), first, np.minimum(first + size, np.repeat(ends, counts))], 1), size


def most_blocks(rows: int, runs: int, size: int) -> int:
    """Upper bound of the blocks of ``size`` rows into which ``rows`` rows are cut: rows without an adapter, then at most ``runs``
    runs side by side, then rows without an adapter."""
    return rows // size + min(rows, runs + 2)
