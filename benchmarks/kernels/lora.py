"""Additions of 16 adapters to the products of Qwen3-0.6B's layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.harness import Gpu, Row
from tests.kernels.lora import Case, product, rows_of
from yardstick_llm.kernels.lora import add_lora, shrink_lora
from yardstick_llm.kernels.lora_gate import lora_gate
from yardstick_llm.kernels.lora_layout import LoraProduct, LoraRows
from yardstick_llm.kernels.lora_rope import lora_rope_write

ADAPTERS = 16
CUDA: Any = "cuda"
PRODUCTS = {
    "qkv_proj": (1024, (2048, 1024, 1024)),
    "o_proj": (2048, (1024,)),
    "gate_up_proj": (1024, (3072, 3072)),
    "down_proj": (3072, (1024,)),
}
"""Inputs, and columns of each part of the output."""


def rows(gpu: Gpu) -> Iterator[Row]:
    """A step of 43 items of 192 tokens, and decoding steps; then larger ranks, and the operations that make additions, which are to
    be compared with ``silu_mul`` and ``qk_norm_rope_write``."""
    for name, (inputs, parts) in PRODUCTS.items():
        for count in (43 * 192, 256, ADAPTERS):
            yield _add(gpu, name, inputs, parts, count, 16)
    for rank in (64, 128):
        yield _add(gpu, "gate_up_proj", *PRODUCTS["gate_up_proj"], 43 * 192, rank)
    for count, rank in ((43 * 192, 16), (43 * 192, 64), (43 * 192, 128), (256, 16), (ADAPTERS, 16)):
        yield _gate(gpu, count, rank)
        yield _rope(gpu, count, rank)


def _add(gpu: Gpu, name: str, inputs: int, parts: tuple[int, ...], count: int, rank: int) -> Row:
    weights, given, outputs = _product(inputs, parts, rank), _rows(count), sum(parts)
    x, y = torch.randn(count, inputs, device="cuda").bfloat16(), torch.zeros(count, outputs, device="cuda").bfloat16()
    # x, the shrunk rows written and read, y read and written, and the matrices.
    moved = 2 * (count * (inputs + 2 * len(parts) * rank + 2 * outputs) + ADAPTERS * rank * (len(parts) * inputs + outputs))
    shape = f"{name}, [{count}, {inputs}] · {ADAPTERS} of rank {rank}"
    return gpu.moved("add_lora", shape, moved, partial(add_lora, y, x, weights, given))


def _gate(gpu: Gpu, count: int, rank: int) -> Row:
    inputs, parts = PRODUCTS["gate_up_proj"]
    delta = shrink_lora(torch.randn(count, inputs, device="cuda").bfloat16(), _product(inputs, parts, rank), _rows(count))
    assert delta is not None
    gate_up = torch.randn(count, sum(parts), device="cuda").bfloat16()
    moved = 2 * (count * (3 * parts[0] + len(parts) * rank) + ADAPTERS * rank * sum(parts))
    shape = f"[{count}, 2 · {parts[0]}], {ADAPTERS} of rank {rank}"
    return gpu.moved("lora_gate", shape, moved, lambda: lora_gate(gate_up, delta, gelu=False))


def _rope(gpu: Gpu, count: int, rank: int, head_dim: int = 128) -> Row:
    inputs, parts = PRODUCTS["qkv_proj"]
    delta = shrink_lora(torch.randn(count, inputs, device="cuda").bfloat16(), _product(inputs, parts, rank), _rows(count))
    assert delta is not None
    heads, kv_heads, _ = (columns // head_dim for columns in parts)
    qkv = torch.randn(count, heads + 2 * kv_heads, head_dim, device="cuda").bfloat16()
    weight, angles = torch.ones(head_dim, device="cuda").bfloat16(), torch.randn(count, head_dim // 2, device="cuda")
    keys, values = torch.zeros(2, 2 * count, kv_heads, head_dim, device="cuda").bfloat16()
    given = weight, weight, 1e-6, angles.cos(), angles.sin(), keys, values, torch.randperm(2 * count, device="cuda")[:count]
    moved = 4 * qkv.numel() + 8 * angles.numel() + 8 * count + 2 * (count * len(parts) * rank + ADAPTERS * rank * sum(parts))
    shape = f"[{count}, {heads} + 2 · {kv_heads}, {head_dim}], {ADAPTERS} of rank {rank}"
    return gpu.moved("lora_rope_write", shape, moved, lambda: lora_rope_write(qkv, delta, *given))


def _product(inputs: int, parts: tuple[int, ...], rank: int) -> LoraProduct:
    return product(Case((rank,) * ADAPTERS, (0,), inputs, parts), CUDA, torch.bfloat16)


def _rows(count: int) -> LoraRows:
    """Runs of about equal length."""
    counts = (count * (number + 1) // ADAPTERS - count * number // ADAPTERS for number in range(ADAPTERS))
    return rows_of(Case((), (0, *counts)), CUDA)
