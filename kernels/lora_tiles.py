"""Parts of the kernels of LoRA adapters: where an adapter's matrices are, and tiles of additions."""

from __future__ import annotations

from yardstick_llm.kernels.lora_layout import RANK_ALIGNMENT
from yardstick_llm.kernels.runtime import jit, tl

RANK_TILE = 16
"""Ranks that one step of a product adds up; tensor cores take no fewer."""
REGISTERS = 128
"""Registers of a thread. With so few, two programs of eight warps share a multiprocessor: one loads while the other computes."""
UNIT = tl.constexpr(RANK_ALIGNMENT)
"""Factor of widths, which kernels take in units of the alignment, so that the compiler knows it."""


@jit()
def entry(
    table: tl.tensor, slot: tl.tensor, product: tl.tensor, products: tl.tensor, capacity: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """First number of a product's matrices in a slot, and their rank, int32; 0 without an adapter."""
    at = table + slot * 2 * products + product
    number = slot * capacity + tl.load(at, mask=slot >= 0, other=0)
    rank = tl.load(at + products, mask=slot >= 0, other=0).to(tl.int32)
    return tl.multiple_of(number, 16), tl.multiple_of(rank, UNIT)


@jit()
def expanded_pair(
    inner: tl.tensor,
    apart: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    rank: tl.tensor,
    real: tl.tensor,
    kept: tl.tensor,
    ONE_PART: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Two tiles of additions to the same rows, float32 [ROW_TILE, COLUMN_TILE] each.

    inner: [ROW_TILE] pointers to the rows of the first tile's part; apart: columns from there to the second tile's part, which is
    the same with ONE_PART; first, second: [COLUMN_TILE] pointers to the tiles' rows of B; real, kept: rows and columns that exist.
    """
    step = tl.arange(0, RANK_TILE)
    first_acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    second_acc = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, rank, RANK_TILE):
        ranks = start + step
        inside = ranks < rank
        row = inner[:, None] + ranks[None, :]
        mask = kept[None, :] & inside[:, None]
        a = tl.load(row, mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(first[None, :] + ranks[:, None], mask=mask, other=0.0)
        first_acc = tl.dot(a, b, first_acc, input_precision="ieee")
        if not ONE_PART:
            a = tl.load(row + apart, mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(second[None, :] + ranks[:, None], mask=mask, other=0.0)
        second_acc = tl.dot(a, b, second_acc, input_precision="ieee")
    return first_acc, second_acc
