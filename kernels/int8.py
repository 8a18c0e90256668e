"""Products of matrices in 8-bit integers on a CPU. Each row of activations and each output channel of weights has a scale.

``x ≈ (codes - 128) · scale`` with ``scale = max|x| / 127``, in bfloat16 rounded to it. Sums of products of codes are exact, so that
a row's result does not depend on the rows beside it. oneDNN multiplies, with VNNI or AMX; without them, its sums of two products
saturate at 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from yardstick_llm.kernels.quantize import MIN_PEAK
from yardstick_llm.kernels.row_chunks import in_threads

MAX_CODE = 127.0
ZERO = 128
"""Code of zero in activations, which are unsigned, as the instructions want them."""

ROUNDING = float(3 << 22) + ZERO
"""Added to a float32 of less than 2^22, it leaves the nearest integer, plus :data:`ZERO`, in the low bits. torch converts integers
to bytes sixteen at a time and floats one by one: quantising [1920, 512] took 0.88 ms with a conversion from floats, and 0.37."""

MOST_COLUMNS = 65_536
"""Longest rows whose sums of products of codes, 255 · 127 each, fit 32 bits."""

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
    codes, scales = _empty_codes(rows, size, x.dtype)
    in_threads(lambda span: _fill_codes(x[span].float(), codes[span], scales[span]), rows, 2 * size)
    return codes, scales


def int8_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` in 8-bit codes. x: [rows, in] float32 or bfloat16; bias: [out] of x's dtype. -> [rows, out], the same.

    In bfloat16 the product is rounded without the scales of the rows, and again with them.
    """
    return _scaled_product(*quantize_rows(x), weight, bias)


def int8_gated(x: Tensor, gate_up: Projection, down: Projection, *, gelu: bool = False) -> Tensor:
    """A gated feed-forward layer, ``down(gate(gate_up(x)))``. A few rows at a time are gated, in float32, and quantised.

    x: [rows, in] float32 or bfloat16 -> [rows, in]. ``gelu``: use GELU, approximated by tanh, in place of SiLU.
    """
    codes, scales = quantize_rows(x)
    product = _product(codes, gate_up.weight, x.dtype)  # [rows, 2 · size], in units of the scales
    size = product.shape[1] // 2
    inner, inner_scales = _empty_codes(len(x), size, x.dtype)

    def gate(span: slice) -> None:
        gated = _gated(product[span], scales[span], gate_up.bias, gelu=gelu)
        _fill_codes(gated, inner[span], inner_scales[span], scales[span])

    in_threads(gate, len(x), 3 * size)
    return _scaled_product(inner, inner_scales, down.weight, down.bias)


def int8_activated(x: Tensor, into: Projection, down: Projection, function: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """``down(function(into(x)))``. ``function`` gets a few rows at a time, in float32, and what it returns is quantised.

    x: [rows, in] float32 or bfloat16 -> [rows, in]. ``function``: [rows, width] -> [rows, size].
    """
    codes, scales = quantize_rows(x)
    product = _product(codes, into.weight, x.dtype)  # in units of the scales
    bias = None if into.bias is None else into.bias.float()
    inner, inner_scales = _empty_codes(len(x), size, x.dtype)

    def activate(span: slice) -> None:
        part, own = product[span].float(), scales[span].float()
        rows = function(part.mul_(own) if bias is None else torch.addcmul(bias, part, own, out=part))
        _fill_codes(rows, inner[span], inner_scales[span])

    in_threads(activate, len(x), 3 * product.shape[1])
    return _scaled_product(inner, inner_scales, down.weight, down.bias)


def _empty_codes(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty((rows, size), dtype=torch.uint8), torch.empty((rows, 1), dtype=dtype)


def _fill_codes(rows: Tensor, codes: Tensor, scales: Tensor, units: Tensor | None = None) -> None:
    """Quantise ``rows``, [rows, size] float32, in ``units``, [rows, 1]."""
    peaks = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()).clamp_(min=MIN_PEAK)
    inverse = MAX_CODE / peaks
    scales.copy_((peaks if units is None else peaks.mul_(units)).mul_(1 / MAX_CODE))
    if scales.dtype != torch.float32:  # a rounded scale makes codes of up to 127.25, which are still 127
        inverse = (1.0 if units is None else units.float()) / scales.float()
    codes.copy_((rows * inverse).add_(ROUNDING).view(torch.int32))  # 1 to 255


def _product(codes: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The product of rows of codes, in units of their scales. -> [rows, out] of ``dtype``."""
    return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
        codes, 1.0, ZERO, weight.codes, weight.scales, weight.zeros, None, 1.0, 0, dtype, "none", [], ""
    )


def _scaled_product(codes: Tensor, scales: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    product = _product(codes, weight, scales.dtype)
    return product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales, out=product)


def _gated(product: Tensor, scales: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    """``silu(gate) · up``, [rows, size] float32. ``product``, gate ‖ up, and the result are in units of the scales; a product in
    float32 is overwritten."""
    gate, up = product.chunk(2, 1)
    gate = gate.float().mul_(scales)
    if bias is not None:
        own, other = bias.float().chunk(2)
        gate, up = gate.add_(own), up + other / scales.float()
    gate = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate, inplace=True)
    return gate.mul_(up)
