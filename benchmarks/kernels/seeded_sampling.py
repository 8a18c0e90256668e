"""Draws over a large vocabulary, and the thresholds of their filters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.harness import Gpu, Row
from kernels.keep_thresholds import keep_thresholds, keep_thresholds_reference
from kernels.seeded_sampling import seeded_choice, seeded_choice_reference, seeded_draw, seeded_draw_reference

VOCAB = 151_936  # Qwen2.5 and Qwen3


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield rows from one row to a large batch, and PyTorch's own operations (eager), which wait for the GPU, as comparison."""
    for count in (1, 16, 100, 800):
        logits = torch.randn(count, VOCAB, device="cuda") * 3
        yield from _draws(gpu, logits)
        yield from _thresholds(gpu, logits)


def _draws(gpu: Gpu, logits: Tensor) -> Iterator[Row]:
    count = len(logits)
    given = logits, torch.ones(count, device="cuda"), torch.arange(count, device="cuda"), torch.full((count,), -9.0, device="cuda")
    shape, read = f"[{count}, {VOCAB}]", 4.0 * logits.numel()
    yield gpu.moved("seeded_draw", shape, read, lambda: seeded_draw(*given))
    yield gpu.moved("seeded_draw, eager", shape, read, lambda: seeded_draw_reference(*given))

    ids = torch.arange(8, device="cuda").expand(count, -1).contiguous()
    few = torch.full((count, 8), 0.125, device="cuda"), ids, given[2]
    yield gpu.moved("seeded_choice", f"[{count}, 8]", 12.0 * 8 * count, lambda: seeded_choice(*few))
    yield gpu.moved("seeded_choice, eager", f"[{count}, 8]", 12.0 * 8 * count, lambda: seeded_choice_reference(*few))


def _thresholds(gpu: Gpu, logits: Tensor) -> Iterator[Row]:
    count = len(logits)
    ones = torch.ones(count, device="cuda")
    for top_k, top_p in ((50, 1.0), (0, 0.9), (50, 0.9)):
        given = logits, ones, torch.full((count,), top_k, device="cuda"), ones * top_p, torch.full_like(ones, float("-inf"))
        shape, read = f"[{count}, {VOCAB}], top-k {top_k}, top-p {top_p}", 4.0 * logits.numel()
        yield gpu.moved("keep_thresholds", shape, read, lambda given=given: keep_thresholds(*given))  # type: ignore[misc]
        yield gpu.moved("keep_thresholds, eager", shape, read, lambda given=given: keep_thresholds_reference(*given))  # type: ignore[misc]
