"""Root-mean-square normalisation, alone and fused with the addition of a residual.

Source of the formula: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl

TILE = 2048
"""Elements a program takes at a time, where rows are narrower than that: heads of 64 or 128 go many to a program."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis, summed in float32. x: [..., size], weight: [size]."""
    return rms_norm_triton(x, weight, eps) if launches(x, weight) else rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised sum and the sum itself: ``(rms_norm(x + residual), x + residual)``, each of x's shape."""
    if launches(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` in plain PyTorch."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` in plain PyTorch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` on a GPU. x: [tokens, size], contiguous, or [tokens, heads, size], where tokens may lie apart.

    Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    expect_device("x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x has {x.dim()} axes, where [tokens, size] or [tokens, heads, size] is expected")
    expect("x", x, x, x.shape, FLOATS, dense_axes=x.dim() - 1)
    expect("weight", weight, x, x.shape[-1:], (x.dtype,))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.shape[1:].numel() // x.shape[-1], x.shape[-1]
    block = power_of_two(size)
    tile = min(power_of_two(rows), max(1, TILE // block))
    _norm_heads[(len(x), -(-rows // tile))](
        x, weight, out, x.stride(0), eps, rows, size, tile, block, num_warps=warps(tile * block)
    )
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` on a GPU. x, residual: [tokens, size], contiguous.

    Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    total, out = torch.empty_like(x), torch.empty_like(x)
    norm_rows(x, residual, weight, eps, out, total, None)
    return out, total
