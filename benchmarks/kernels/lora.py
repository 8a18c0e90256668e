"""Additions of 16 adapters to the products of Qwen3-0.6B's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.harness import Gpu, Row
from kernels.lora import add_lora
from kernels.lora_layout import LoraMatrices, LoraProduct, LoraRows, LoraRun, block_runs

ADAPTERS = 16
PRODUCTS = {
    "qkv_proj": (1024, (2048, 1024, 1024)),
    "o_proj": (2048, (1024,)),
    "gate_up_proj": (1024, (3072, 3072)),
    "down_proj": (3072, (1024,)),
}
"""Inputs, and columns of each part of the output."""


def rows(gpu: Gpu) -> Iterator[Row]:
    """A step of 43 items of 192 tokens, and decoding steps, with eager PyTorch as comparison; then larger ranks."""
    for name, (inputs, parts) in PRODUCTS.items():
        for count in (43 * 192, 256, ADAPTERS):
            yield from _at(gpu, name, inputs, parts, count, 16)
    for rank in (64, 128):
        yield from _at(gpu, "gate_up_proj", *PRODUCTS["gate_up_proj"], 43 * 192, rank)


def _at(gpu: Gpu, name: str, inputs: int, parts: tuple[int, ...], count: int, rank: int) -> Iterator[Row]:
    product, given = _product(inputs, parts, rank), _rows(count)
    outputs = sum(parts)
    x, y = torch.randn(count, inputs, device="cuda").bfloat16(), torch.zeros(count, outputs, device="cuda").bfloat16()
    # x, the shrunk rows written and read, y read and written, and the matrices.
    moved = 2 * (count * (inputs + 2 * len(parts) * rank + 2 * outputs) + ADAPTERS * rank * (len(parts) * inputs + outputs))
    shape = f"{name}, [{count}, {inputs}] · {ADAPTERS} of rank {rank}"
    operations: dict[str, Callable[..., Tensor]] = {"add_lora": add_lora, "add_lora, eager": _add_lora_reference}
    for label, operation in operations.items():
        yield gpu.moved(label, shape, moved, partial(operation, y, x, product, given))


def _product(inputs: int, parts: tuple[int, ...], rank: int) -> LoraProduct:
    outputs, behind = sum(parts), len(parts) * rank * inputs
    weights = torch.randn(ADAPTERS, behind + outputs * rank, device="cuda").mul_(0.01).bfloat16()
    table = torch.tensor([[0], [rank]], device="cuda").repeat(ADAPTERS, 1, 1)
    matrices = [_matrices(own, inputs, parts, rank) for own in weights]
    return LoraProduct(matrices, weights, table, 0, inputs, parts)


def _matrices(weights: Tensor, inputs: int, parts: tuple[int, ...], rank: int) -> LoraMatrices:
    a, b = torch.split(weights, [len(parts) * rank * inputs, sum(parts) * rank])
    split, begin = [], 0
    for columns, own in zip(parts, torch.split(b.view(-1, rank), list(parts)), strict=True):
        split.append((begin, begin + columns, own))
        begin += columns
    return LoraMatrices(a.view(-1, inputs), tuple(split), rank)


def _rows(count: int) -> LoraRows:
    """Runs of about equal length."""
    ends = [count * number // ADAPTERS for number in range(ADAPTERS + 1)]
    runs = tuple(LoraRun(slot, ends[slot], ends[slot + 1]) for slot in range(ADAPTERS))
    blocks, size = block_runs(runs, count)
    return LoraRows(runs, torch.from_numpy(blocks).reshape(-1).cuda(), size)
