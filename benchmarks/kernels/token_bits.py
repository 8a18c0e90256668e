"""Exclusion of tokens from rows of logits by bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import Gpu, Row
from kernels.token_bits import exclude_, exclude_reference_

VOCAB = 151_936  # Qwen2.5 and Qwen3


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield rows from one row to a large batch, of which every token is excluded, with eager PyTorch as comparison."""
    for count in (1, 16, 64, 256):
        logits = torch.randn(count, VOCAB, device="cuda")
        given = logits, torch.arange(count, device="cuda"), torch.zeros(count, -(-VOCAB // 32), dtype=torch.int32, device="cuda")
        shape, moved = f"[{count}, {VOCAB}]", 4.125 * logits.numel()
        yield gpu.moved("exclude", shape, moved, lambda given=given: exclude_(*given))  # type: ignore[misc]
        yield gpu.moved("exclude, eager", shape, moved, lambda given=given: exclude_reference_(*given))  # type: ignore[misc]
