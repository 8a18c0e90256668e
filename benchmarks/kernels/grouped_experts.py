"""Products of rows with the experts chosen for them, at Qwen3-30B-A3B's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.harness import Gpu, Row
from kernels.grouped_experts import block_pairs, grouped_linear

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768


def rows(gpu: Gpu) -> Iterator[Row]:
    """Decoding steps, which read the weights of the chosen experts, and steps of scores, which compute."""
    weight = torch.empty(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for matrix in weight:
        matrix.normal_()
    for count in (1, 16, 256, 8192):
        x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
        # Consecutive experts, so that a step of 16 rows and more reads all of them.
        experts = (torch.arange(count, device="cuda")[:, None] * CHOSEN + torch.arange(CHOSEN, device="cuda")) % EXPERTS
        read = 2 * min(EXPERTS, count * CHOSEN) * weight[0].numel()
        operations = 2 * count * CHOSEN * weight[0].numel()
        shape = f"[{count}, {HIDDEN}] · {CHOSEN} of [{EXPERTS}, {2 * INNER}, {HIDDEN}]ᵀ"
        bound_by_bytes = read / gpu.bandwidth > operations / gpu.flops
        work = (gpu.moved, read) if bound_by_bytes else (gpu.computed, operations)
        tables = partial(block_pairs, experts, EXPERTS)
        yield gpu.moved("block_pairs", f"[{count}, {CHOSEN}] of {EXPERTS}", 8 * experts.numel(), tables)
        # Both products of a layer share the tables.
        yield work[0]("grouped_linear", shape, work[1], partial(grouped_linear, x, weight, experts, tables()))
