"""The linear layer: on a CPU in float32 through oneDNN, which torch itself only uses for lower precisions.

Torch multiplies float32 matrices with MKL, which keeps to AVX2 on processors that are not Intel's. On one core of an AMD EPYC
(Zen 5) with AVX-512, [256, 512] by [512, 3072]: MKL 61-67 GFLOP/s, oneDNN 130; over lengths that vary from call to call 2.5 times
as many tokens a second. On Zen 4, whose units are half as wide, the two are about as fast.

oneDNN has a layout of its own for weights, which it otherwise makes anew in each call. :func:`pack` makes it once. On Zen 4 packed
weights are the fastest of four ways, but for products below 100 µs in a tiny model (``python -m benchmarks products``). So no
library is chosen at the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PACKED_ROWS = 256
"""Rows of the input that a packed weight is laid out for; products of other numbers of rows take it as well."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias``. x: [rows, in]; weight: [out, in]; bias: [out]. -> [rows, out]"""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _product(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """``weight`` [out, in], float32, for :func:`packed_linear`: a tensor that only oneDNN reads."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` with a weight from :func:`pack`; no gradients. x: [rows, in] float32 -> [rows, out]"""
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's inner product, with nothing fused to it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """torch has no derivative for the operator, so here it is, in the same products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if needs_x else None,
            _product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
