"""Products of matrices in 8-bit integers on a CPU. Each row of activations and each output channel of weights has a scale.

``x ≈ (codes - 128) · scale`` with ``scale = max|x| / 127``, in bfloat16 rounded to it. Sums of products of codes are exact, so that
a row's result does not depend on the rows beside it. oneDNN multiplies, with VNNI or AMX; without them, its sums of two products
saturate at 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from yardstick_llm.kernels.quantize import MIN_PEAK
from yardstick_llm.kernels.row_chunks import in_threads
from yardstick_llm.kernels.runtime import flat, loops

MAX_CODE = 127.0
ZERO = 128
"""Code of zero in activations, which are unsigned, as the instructions want them."""

MOST_COLUMNS = 65_536
"""Longest rows whose sums of products of codes, 255 · 127 each, fit 32 bits."""

UNGATED, GATE_FIRST, GATE_SECOND = range(3)
"""Whether a feed-forward layer has a gate, and which half of its first product that is."""

INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni")
"""Any of these multiplies unsigned by signed bytes and sums in 32 bits; the fastest first."""


def instructions() -> str | None:
    """The first of :data:`INSTRUCTIONS` that this processor has; None without any."""
    found = torch.cpu.get_capabilities()
    return next((name for name in INSTRUCTIONS if found.get(name)), None)


class Projection(Protocol):
    """A linear layer."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The codes of a weight in oneDNN's own layout."""

    codes: Tensor
    """[out, in] int8, opaque"""
    scales: Tensor
    """[out] float32"""
    zeros: Tensor
    """[out] int32: the operator wants a zero point for each channel."""


def pack(weight: Tensor) -> PackedWeight:
    """weight: [out, in], in any dtype, on a CPU."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_(min=MIN_PEAK) / MAX_CODE
    return pack_codes((wide / scales[:, None]).round_().to(torch.int8), scales)


def pack_codes(codes: Tensor, scales: Tensor) -> PackedWeight:
    """codes: [out, in] int8; scales: [out] float32."""
    return PackedWeight(torch.ops.onednn.qlinear_prepack(codes, None), scales, torch.zeros(len(codes), dtype=torch.int32))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, size] float32 or bfloat16 -> codes, [rows, size] uint8, and scales, [rows, 1] of x's dtype."""
    rows, size = x.shape
    codes, scales = torch.empty((rows, size), dtype=torch.uint8), torch.empty((rows, 1))
    given, rounded, to, of, quantize = flat(x.float()), x.dtype != torch.float32, flat(codes), flat(scales), loops().quantize
    in_threads(lambda span: quantize(given, size, rounded, to, of, span.start, min(span.stop, rows)), rows, 2 * size)
    return codes, scales.to(x.dtype)


def int8_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` in 8-bit codes. x: [rows, in] float32 or bfloat16; bias: [out] of x's dtype. -> [rows, out], the same.

    In bfloat16 the product is rounded without the scales of the rows, and again with them.
    """
    return _scaled_product(*quantize_rows(x), weight, bias)


def int8_activated(x: Tensor, into: Projection, down: Projection, function: str, gated: int, size: int) -> Tensor:
    """``down(function(into(x)))``: a feed-forward layer, whose activations are computed in float32 and quantised.

    x: [rows, in] float32 or bfloat16 -> [rows, in]. ``function``: gelu, gelu_tanh, relu, silu or tanh. ``gated``: :data:`UNGATED`,
    or the half of the product that it is applied to. ``size``: columns between the layers.
    """
    codes, scales = quantize_rows(x)
    product = _product(codes, into.weight, x.dtype).float()  # in units of the scales
    rows, rounded, native = len(x), x.dtype != torch.float32, loops()
    inner, inner_scales = torch.empty((rows, size), dtype=torch.uint8), torch.empty((rows, 1))
    bias = None if into.bias is None else into.bias.float()
    given = flat(product), flat(scales.float()), flat(bias), getattr(native, function.upper()), gated, rounded, size
    to = flat(inner), flat(inner_scales)
    in_threads(lambda span: native.activate(*given, *to, span.start, min(span.stop, rows)), rows, 3 * product.shape[1])
    return _scaled_product(inner, inner_scales.to(x.dtype), down.weight, down.bias)


def _product(codes: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The product of rows of codes, in units of their scales. -> [rows, out] of ``dtype``."""
    return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
        codes, 1.0, ZERO, weight.codes, weight.scales, weight.zeros, None, 1.0, 0, dtype, "none", [], ""
    )


def _scaled_product(codes: Tensor, scales: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    product = _product(codes, weight, scales.dtype)
    return product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales, out=product)
