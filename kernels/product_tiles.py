"""Tiles of a product ``x · weightᵀ`` on Hopper: their sizes, the order in which programs take them, and how blocks are loaded.

The kernels that multiply and then do more with each tile (:mod:`kernels.linear_silu_mul`, :mod:`kernels.linear_qk_norm_rope`)
share this. Tensor descriptors are made on the host, so that a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from yardstick_llm.kernels.runtime import INTERPRETED, jit, tl

HOPPER = (9, 0)
"""Compute capability of the GPUs that the tiles are chosen for."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is divided."""

    rows: int = 128
    columns: int = 256
    """Rows of the weight that a program multiplies with at once."""
    step: int = 64
    """Summands between two loads."""
    stages: int = 3
    warps: int = 8
    group: int = 8
    """Tiles of rows that follow each other before the next columns, so that the level-2 cache holds what they share."""
    tma: bool = True
    """Load through tensor descriptors; otherwise through pointers."""
    resident: int = 1
    """Programs that each multiprocessor has, which go on to the next tile; 0 for a program a tile."""
    specialized: bool = False
    """Let some warps load and others multiply."""

    @property
    def flatten(self) -> bool:
        """Whether a program loads for its next tile while it ends one."""
        return self.resident > 0 and not self.specialized

    def programs(self, tiles: int, device: torch.device) -> int:
        """Number of programs that compute ``tiles`` tiles."""
        return min(tiles, self.resident * multiprocessors(device)) if self.resident else tiles

    def operand(self, tensor: Tensor, *rows: int) -> Any:
        """Return the argument from which a kernel loads blocks of the matrix: a tensor descriptor, or the tensor itself.

        ``rows``: of a block, for each axis but the last.
        """
        if not self.tma:
            return tensor
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(tensor, [*rows, self.step])


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 3 in the interpreter, so that a program takes several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU that the tiles are for; the interpreter passes for one."""
    return torch.cuda.get_device_capability(device) == HOPPER if device.type == "cuda" else INTERPRETED


def is_aligned(*matrices: Tensor) -> bool:
    """Whether tensor descriptors can address these matrices: contiguous, from addresses and with rows of multiples of 16 bytes."""
    return all(
        matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 and matrix.shape[-1] * matrix.element_size() % 16 == 0
        for matrix in matrices
    )


@jit()
def place(tile: tl.tensor, row_tiles: tl.tensor, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Part of kernels: row and column of a tile among the tiles."""
    first = tile // (GROUP * COLUMN_TILES) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * COLUMN_TILES)
    return first + within % height, within // height


@jit()
def block(
    matrix: tl.tensor, row: tl.tensor, start: tl.tensor, rows: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Part of kernels: [ROWS, STEP] of a matrix, [rows, SIZE], from ``row`` and ``start``. Beyond its rows, anything."""
    if TMA:
        found = matrix.load([row, start])
    else:
        inside = (row + tl.arange(0, ROWS)) % rows
        found = tl.load(matrix + inside.to(tl.int64)[:, None] * SIZE + (start + tl.arange(0, STEP))[None, :])
    return found


__all__ = ["HOPPER", "Tiles", "block", "is_aligned", "is_hopper", "multiprocessors", "place"]
