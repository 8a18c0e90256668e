"""Products of matrices in 8-bit integers on a CPU. Each row of activations and each output channel of weights has a scale.

``x ≈ (codes - 128) · scale`` with ``scale = max|x| / 127``. Sums of products of codes are exact, so that a row's result does not
depend on the rows beside it. oneDNN multiplies, with VNNI or AMX; without them, its sums of two products saturate at 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantize import MIN_PEAK

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
    codes = (wide / scales[:, None]).round_().to(torch.int8)
    return PackedWeight(torch.ops.onednn.qlinear_prepack(codes, None), scales, torch.zeros(len(codes), dtype=torch.int32))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, size] float32 -> codes, [rows, size] uint8, and scales, [rows, 1] float32."""
    peaks = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).clamp_(min=MIN_PEAK)
    codes = (x * (MAX_CODE / peaks)).add_(ROUNDING).view(torch.int32).to(torch.uint8)  # 1 to 255
    return codes, peaks.mul_(1 / MAX_CODE)


def int8_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` in 8-bit codes. x: [rows, in] float32; bias: [out] float32. -> [rows, out] float32."""
    codes, scales = quantize_rows(x)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, weight.codes, weight.scales, weight.zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    product.mul_(scales)
    return product if bias is None else product.add_(bias)
