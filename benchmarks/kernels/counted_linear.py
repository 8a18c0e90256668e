"""Products of the first rows, counted on the device, at Qwen2.5-1.5B's sizes, beside torch's product of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.harness import Gpu, Row
from kernels.counted_linear import counted_linear
from kernels.linear import linear

ROWS = 1280
"""Five candidates of 256 rows."""
SHAPES = ((17_920, 1536), (1536, 8960))
"""Columns and size: gate_up_proj, which counted passes compute with this kernel, and down_proj, which is here to be compared."""


def rows(gpu: Gpu) -> Iterator[Row]:
    """All rows, which compares the speed with torch's, and two of five."""
    for columns, size in SHAPES:
        x = torch.randn(ROWS, size, device="cuda").bfloat16()
        weight = torch.randn(columns, size, device="cuda").bfloat16()
        shape = f"{ROWS}, {size}] · [{columns}, {size}]ᵀ"
        yield gpu.computed("linear", f"[{shape}", 2 * ROWS * columns * size, partial(linear, x, weight))
        for count in (ROWS, 2 * ROWS // 5):
            there = torch.tensor([count], device="cuda")
            work = 2 * count * columns * size
            yield gpu.computed("counted_linear", f"[{count} of {shape}", work, partial(counted_linear, x, weight, None, there))
