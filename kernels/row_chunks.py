"""Work on a bounded number of rows at a time, where temporaries are several times as large as their input."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Elements computed at a time: 64 MiB of float32. Smaller chunks of logits would read the head's weights more often."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""Elements computed at a time on a CPU. This many fit its caches: a third of the time for noise of 2^22 (one core)."""
THREAD_ELEMENTS = 1 << 18
"""Elements of a chain of operations on rows that a thread computes at a time on a CPU: 1 MiB of float32, so that each operation
finds in the caches of the core what the one before left there."""


def row_chunks(rows: Tensor, width: int = 0) -> tuple[Tensor, ...]:
    """``rows`` cut along the first axis so that a part has at most the elements of a chunk; width: of a row, 0: its last axis."""
    limit = CPU_CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS
    return torch.split(rows, max(1, limit // (width or rows.shape[-1])))


def cached_spans(rows: Tensor, width: int) -> Iterator[slice]:
    """Slices of the first axis, with :data:`THREAD_ELEMENTS` for each thread, where a chain of operations has ``width`` a row."""
    size = max(1, THREAD_ELEMENTS // width) * torch.get_num_threads()
    return (slice(start, start + size) for start in range(0, len(rows), size))
