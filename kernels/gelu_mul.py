"""The gate of a GeGLU feed-forward layer: alone, and fused with quantisation to FP8.

Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202; GELU is approximated by tanh (Hendrycks and Gimpel 2016,
arXiv 1606.08415), as in Gemma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.quantize import FP8, quantize_rows_reference
from yardstick_llm.kernels.runtime import launches, needs_gradient
from yardstick_llm.kernels.silu_mul import launch_silu_mul


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) · up`` of gate ‖ up side by side. gate_up: [tokens, 2 · size] -> [tokens, size]."""
    return gelu_mul_triton(gate_up) if launches(gate_up) else gelu_mul_reference(gate_up)


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """:func:`gelu_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = torch.nn.functional.gelu(gate, approximate="tanh")
    return gate * up if needs_gradient(gate_up) else gate.mul_(up)


def gelu_mul_triton(gate_up: Tensor) -> Tensor:
    """:func:`gelu_mul` on a GPU, rounded once. Contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // 2))
    launch_silu_mul(gate_up, out, gelu=True)
    return out


def gelu_mul_quantized(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`gelu_mul` in float32, then FP8. [tokens, 2 · size] -> [tokens, size] e4m3, scales [tokens, 1] float32."""
    return gelu_mul_quantized_triton(gate_up) if launches(gate_up) else gelu_mul_quantized_reference(gate_up)


def gelu_mul_quantized_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`gelu_mul_quantized` in plain PyTorch."""
    return quantize_rows_reference(gelu_mul_reference(gate_up.float()))


def gelu_mul_quantized_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`gelu_mul_quantized` on a GPU. Contiguous. Raises ValueError for other shapes, dtypes, devices or layouts."""
    out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // 2), dtype=FP8)
    scales = gate_up.new_empty((len(gate_up), 1), dtype=torch.float32)
    launch_silu_mul(gate_up, out, scales, gelu=True)
    return out, scales
