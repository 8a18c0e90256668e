"""Adapters and their rows for tests of the kernels of LoRA."""

from __future__ import annotations

from typing import NamedTuple

import torch

from yardstick_llm.kernels.lora_layout import (
    ALIGNMENT,
    LoraMatrices,
    LoraProduct,
    LoraRows,
    LoraRun,
    block_runs,
    most_blocks,
    padded_rank,
)

INDEX, PRODUCTS, MAX_RANK = 1, 3, 128


class Case(NamedTuple):
    """Rows and the adapters that they have."""

    ranks: tuple[int, ...]
    """Rank of each slot; 0: the adapter does not change the product."""
    counts: tuple[int, ...]
    """Rows without adapter, and rows of each slot."""
    inputs: int = 48
    parts: tuple[int, ...] = (40, 24, 24)


def product(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> LoraProduct:
    """One of several products, which begins elsewhere in each slot. All other numbers are NaN."""
    generator = torch.Generator().manual_seed(len(case.counts))
    outputs, parts = sum(case.parts), len(case.parts)
    numbers = padded_rank(max(case.ranks)) * (parts * case.inputs + outputs)
    capacity = -(-numbers // ALIGNMENT) * ALIGNMENT + ALIGNMENT * (len(case.ranks) + 1)
    weights = torch.full((len(case.ranks), capacity), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(case.ranks), 2, PRODUCTS), 10**6, device=device)
    matrices: list[LoraMatrices | None] = []
    for slot, own in enumerate(case.ranks):
        begin, rank = ALIGNMENT * (slot + 1), padded_rank(own)
        table[slot, :, INDEX] = torch.tensor([begin, rank])
        behind, end = begin + parts * rank * case.inputs, begin + rank * (parts * case.inputs + outputs)
        a, b = weights[slot, begin:behind].view(-1, case.inputs), weights[slot, behind:end].view(outputs, -1 if rank else 0)
        a.copy_(torch.randn(a.shape, generator=generator) * case.inputs**-0.5)
        b.copy_(torch.randn(b.shape, generator=generator) * max(rank, 1) ** -0.5)
        a.view(parts, rank, case.inputs)[:, own:] = b[:, own:] = 0
        ends = torch.tensor(case.parts).cumsum(0).tolist()
        split = tuple((end - size, end, b[end - size : end]) for size, end in zip(case.parts, ends, strict=True))
        matrices.append(LoraMatrices(a, split, rank) if rank else None)
    return LoraProduct(matrices, weights, table, INDEX, case.inputs, case.parts)


def rows_of(case: Case, device: torch.device, *, shuffled: bool = False) -> LoraRows:
    """Runs of rows in order of their slots; ``shuffled``: through an order."""
    begin, runs = case.counts[0], []
    for slot, count in enumerate(case.counts[1:]):
        if count:
            runs.append(LoraRun(slot, begin, begin + count))
        begin += count
    blocks, size = block_runs(runs, begin)
    order = torch.randperm(begin, generator=torch.Generator().manual_seed(1)).to(device) if shuffled else None
    return LoraRows(tuple(runs), torch.from_numpy(blocks).reshape(-1).to(device), size, order)


def captured(case: Case, rows: LoraRows, padding: int = 0) -> LoraRows:
    """``rows`` and ``padding`` rows behind them as a captured launch has them: room for all blocks and ranks, and unknown runs."""
    count = sum(case.counts) + padding
    found, size = block_runs(rows.runs, count, rows.size)
    blocks = torch.zeros(3 * most_blocks(count, len(case.ranks), size), dtype=torch.int64, device=rows.blocks.device)
    blocks[: found.size] = torch.from_numpy(found).reshape(-1)
    return rows._replace(runs=(), blocks=blocks, most_rank=MAX_RANK)
