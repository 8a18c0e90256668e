"""Products of matrices in FP8 (e4m3): each row of activations and each output channel of weights has a scale of its own.

``x ≈ codes · scale`` with ``scale = max|x| / 448``, so that the largest number of a row is the largest that e4m3 holds. What is
fused with it stands beside its plain form: ``rms_norm_quantized``, ``add_rms_norm_quantized``, ``silu_mul_quantized``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.int8 import MIN_PEAK
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl, warps

FP8 = torch.float8_e4m3fn

MAX_CODE = 448.0
"""The largest number of e4m3."""

_MAX_CODE = tl.constexpr(MAX_CODE)
_MIN_PEAK = tl.constexpr(MIN_PEAK)


SIDE = 16
"""A GPU multiplies matrices of e4m3 whose sides are multiples of this; only the rows of activations may be any number."""

CAPABILITY = (8, 9)
"""The first GPUs with products of e4m3: Ada; Hopper is 9.0."""


def supported(device: torch.device) -> bool:
    """Whether the device is a GPU that multiplies e4m3 with a scale a row."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of activations, [tokens, in], or of the output channels of weights, [out, in].

    x: [rows, size] -> [rows, size] e4m3, [rows, 1] float32.
    """
    return quantize_rows_triton(x) if launches(x) else quantize_rows_reference(x)


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` in plain PyTorch."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=MIN_PEAK) / MAX_CODE
    return (wide / scales).clamp(-MAX_CODE, MAX_CODE).to(FP8), scales


def quantize_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` on a GPU. x: contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    codes, scales = torch.empty_like(x, dtype=FP8), x.new_empty((len(x), 1), dtype=torch.float32)
    launch_quantize_rows(x, codes, scales)
    return codes, scales


def launch_quantize_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Fill ``codes``, of any dtype and rounded to it, and ``scales``."""
    expect_device("x", x)
    expect("x", x, x, (len(x), x.shape[-1]), FLOATS)
    block = power_of_two(x.shape[1])
    _quantize_rows[(len(x),)](x, codes, scales, x.shape[1], block, num_warps=warps(block))


def scaled_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``(x · x_scales) · (weight · weight_scales)ᵀ + bias``, in ``dtype``.

    x: [rows, in] e4m3; x_scales: [rows, 1] float32; weight: [out, in] e4m3; weight_scales: [out, 1] float32; bias: [out] of
    ``dtype``; all contiguous. -> [rows, out]. On a GPU (see :func:`supported`), in and out are multiples of :data:`SIDE`, dtype is
    bfloat16 and Hopper's tensor cores sum with fewer bits than float32 has; on a CPU everything is summed in float32.

    Raises ValueError for what a GPU's product does not take.
    """
    if not x.is_cuda:
        return scaled_linear_reference(x, x_scales, weight, weight_scales, bias, dtype)
    if dtype != torch.bfloat16:
        raise ValueError(f"a GPU's FP8 product with a scale a row is bfloat16, and {dtype} is asked for")
    if any(side % SIDE for side in weight.shape):
        raise ValueError(f"weight has shape {list(weight.shape)}, where multiples of {SIDE} are expected")
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=weight_scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def scaled_linear_reference(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """:func:`scaled_linear` in plain PyTorch, summed in float32, with any sides and in any dtype on a GPU too."""
    product = linear(x.float(), weight.float()) * x_scales * weight_scales.t()
    return (product if bias is None else product + bias).to(dtype)


def expect_scales(x: Tensor, x_scales: Tensor | None, weight_scales: Tensor | None, columns: int) -> None:
    """Raise ValueError unless ``x`` has e4m3 codes with the scales of its rows and of the weight's ``columns``, or neither."""
    if {x.dtype == FP8, x_scales is not None, weight_scales is not None} == {True, False}:
        raise ValueError("x_scales and weight_scales are given with e4m3 codes, and with nothing else")
    if x_scales is not None and weight_scales is not None:
        expect("x_scales", x_scales, x, (len(x), 1), (torch.float32,))
        expect("weight_scales", weight_scales, x, (columns, 1), (torch.float32,))


@jit()
def row_codes(rows: tl.tensor) -> tl.tensor:
    """Part of kernels. rows: [rows, size] float32. -> the numbers to be rounded to codes, [rows, size]; scales, [rows]."""
    # Triton's "/" may be two units in the last place off; scales are those of the reference, bit for bit.
    scales = tl.div_rn(tl.maximum(tl.max(tl.abs(rows), axis=1), _MIN_PEAK), _MAX_CODE)
    codes = rows / scales[:, None]
    # Rounding can make the quotient of the peak larger than the largest code.
    return tl.minimum(tl.maximum(codes, -_MAX_CODE), _MAX_CODE), scales


@jit()
def _quantize_rows(x: tl.tensor, codes: tl.tensor, scales: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Each program quantises one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    kept = columns < SIZE
    found, scale = row_codes(tl.load(x + row * SIZE + columns, mask=kept, other=0.0).to(tl.float32))
    tl.store(codes + row * SIZE + columns, found.to(codes.dtype.element_ty), mask=kept)
    tl.store(scales + row + tl.arange(0, 1), scale)
