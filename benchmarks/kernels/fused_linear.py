"""Products with what follows them in the same kernel, beside cuBLAS's product and the kernel that would follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.harness import Gpu, Row
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.linear_qk_norm_rope import linear_qk_norm_rope_triton
from yardstick_llm.kernels.linear_silu_mul import linear_silu_mul_triton
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write
from yardstick_llm.kernels.quantize import quantize_rows, scaled_linear
from yardstick_llm.kernels.silu_mul import silu_mul

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
"""Qwen3-0.6B."""


@dataclass(frozen=True)
class Case:
    """One product: its kernel, and what computes the same without it."""

    name: str
    flops: float
    run: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield rows for Qwen3-0.6B's products in large steps."""
    for tokens in (8192, 16384):
        for case in (gated(tokens), qkv(tokens), qkv(tokens, fp8=True)):
            for name, run in {"fused": case.run, **case.peers}.items():
                yield gpu.computed(f"{case.name}, {name}", f"[{tokens}, {HIDDEN}]", case.flops, run)


def gated(tokens: int) -> Case:
    """The gate and up projections with SwiGLU."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = (torch.randn(2 * INTERMEDIATE, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    return Case(
        f"linear_silu_mul {tokens}",
        2 * tokens * weight.numel(),
        lambda: linear_silu_mul_triton(x, weight),
        {"product": lambda: linear(x, weight), "product and silu_mul": lambda: silu_mul(linear(x, weight))},
    )


def qkv(tokens: int, *, fp8: bool = False) -> Case:
    """The projections to queries, keys and values with QK-norm, rotation and the write to slots."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = (torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    norms = torch.rand(2, HEAD_DIM, device="cuda").add(0.5).bfloat16()
    angles = torch.randn(tokens, HEAD_DIM // 2, device="cuda") * 10
    keys, values = torch.zeros(2, tokens, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    slots = torch.randperm(tokens, device="cuda")
    given = (norms[0], norms[1], 1e-6, angles.cos(), angles.sin(), keys, values, slots)
    codes, scales = quantize_rows(x)
    weight_codes, weight_scales = quantize_rows(weight)

    def run() -> Tensor:
        if fp8:
            return linear_qk_norm_rope_triton(codes, weight_codes, None, *given, x_scales=scales, weight_scales=weight_scales)
        return linear_qk_norm_rope_triton(x, weight, None, *given)

    def product() -> Tensor:
        return scaled_linear(codes, scales, weight_codes, weight_scales) if fp8 else linear(x, weight)

    def both() -> Tensor:
        return qk_norm_rope_write(product().view(tokens, -1, HEAD_DIM), *given)

    name = f"linear_qk_norm_rope{' fp8' if fp8 else ''} {tokens}"
    return Case(name, 2 * tokens * weight.numel(), run, {"product": product, "product and qk_norm_rope_write": both})
