"""Rows a few at a time, where temporaries are several times as large as what they are made from."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Elements worked on at a time: 64 MiB of float32."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""The same on a CPU, whose caches hold so many: noise takes a third of the time that it takes on 2^22 (one core)."""


def row_chunks(rows: Tensor, width: int = 0) -> tuple[Tensor, ...]:
    """Cut along the first axis so that a part has few enough elements, at ``width`` (0: its last axis) a row."""
    limit = CPU_CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS
    return torch.split(rows, max(1, limit // (width or rows.shape[-1])))
