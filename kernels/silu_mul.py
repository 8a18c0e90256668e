"""The gate of a SwiGLU feed-forward layer: alone, and fused with quantisation to FP8. :mod:`kernels.gelu_mul` shares its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.quantize import FP8, quantize_rows_reference, row_codes
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, needs_gradient, power_of_two, tl, warps

BLOCK = 1024
"""Elements of the result that a program computes where nothing needs the whole row."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) · up`` of gate ‖ up side by side. gate_up: [tokens, 2 · size] -> [tokens, size]."""
    return silu_mul_triton(gate_up) if launches(gate_up) else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """:func:`silu_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = torch.nn.functional.silu(gate)
    return gate * up if needs_gradient(gate_up) else gate.mul_(up)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """:func:`silu_mul` on a GPU, rounded once. Contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // 2))
    launch_silu_mul(gate_up, out)
    return out


def silu_mul_quantized(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`silu_mul` in float32, then FP8. [tokens, 2 · size] -> [tokens, size] e4m3, scales [tokens, 1] float32."""
    return silu_mul_quantized_triton(gate_up) if launches(gate_up) else silu_mul_quantized_reference(gate_up)


def silu_mul_quantized_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`silu_mul_quantized` in plain PyTorch."""
    return quantize_rows_reference(silu_mul_reference(gate_up.float()))


def silu_mul_quantized_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`silu_mul_quantized` on a GPU. Contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // 2), dtype=FP8)
    scales = gate_up.new_empty((len(gate_up), 1), dtype=torch.float32)
    launch_silu_mul(gate_up, out, scales)
    return out, scales


def launch_silu_mul(gate_up: Tensor, out: Tensor, scales: Tensor | None = None, *, gelu: bool = False) -> None:
    """Check what was given, and fill ``out``, of any dtype; with ``scales``, [tokens, 1] float32, divided by them.

    ``gelu``: use GELU, approximated by tanh, in place of SiLU.
    """
    expect_device("gate_up", gate_up)
    tokens, size = len(gate_up), gate_up.shape[-1] // 2
    expect("gate_up", gate_up, gate_up, (tokens, 2 * size), FLOATS)
    block = min(power_of_two(size), BLOCK) if scales is None else power_of_two(size)
    _silu_mul[(tokens, -(-size // block))](gate_up, out, scales, size, block, gelu, num_warps=warps(block))


@jit()
def _silu_mul(
    gate_up: tl.tensor, out: tl.tensor, scales: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
) -> None:
    """BLOCK columns of a token a program: all of them where there are scales."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    kept = columns < SIZE
    start = gate_up + token * 2 * SIZE
    gate = tl.load(start + columns, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE + columns, mask=kept, other=0.0).to(tl.float32)
    rows = gated(gate, up, GELU)
    if scales is not None:
        rows, row_scales = row_codes(rows)
        tl.store(scales + token + tl.arange(0, 1), row_scales)
    tl.store(out + token * SIZE + columns, rows.to(out.dtype.element_ty), mask=kept)


@jit()
def gated(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Part of kernels: ``silu(gate) · up``, or ``gelu(gate) · up``; float32."""
    slope = gate
    if GELU:  # x · (1 + tanh(y)) / 2 = x · sigmoid(2y)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 · sqrt(2 / pi)
        slope = tl.maximum(slope, -80.0)  # the exponential of more overflows
    return gate * tl.sigmoid(slope) * up
