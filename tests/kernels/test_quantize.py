"""Quantisation to FP8, alone and fused, and products of what comes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.gelu_mul import gelu_mul_quantized_reference, gelu_mul_quantized_triton
from yardstick_llm.kernels.quantize import (
    FP8,
    launch_quantize_rows,
    quantize_rows,
    quantize_rows_reference,
    quantize_rows_triton,
    scaled_linear,
    supported,
)
from yardstick_llm.kernels.rms_norm import (
    add_rms_norm_quantized_reference,
    add_rms_norm_quantized_triton,
    launch_rms_norm,
    rms_norm_quantized_reference,
    rms_norm_quantized_triton,
    rms_norm_reference,
)
from yardstick_llm.kernels.silu_mul import (
    launch_silu_mul,
    silu_mul_quantized_reference,
    silu_mul_quantized_triton,
    silu_mul_reference,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 64), (2, 1500), (0, 64)]
EPS = 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = _normal(shape, dtype, device)
    _assert_unrounded(lambda out, scales: launch_quantize_rows(x, out, scales), x.float())
    _assert_codes(quantize_rows_triton(x), quantize_rows_reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = _normal(shape, dtype, device), _normal(shape[1:], dtype, device)
    normed = rms_norm_reference(x.float(), weight.float(), EPS)
    _assert_unrounded(lambda out, scales: launch_rms_norm(x, None, weight, EPS, out, None, scales), normed)
    _assert_codes(rms_norm_quantized_triton(x, weight, EPS), rms_norm_quantized_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    # Sums of eighths are exact in every dtype, so that the interpreter, which cuts off, rounds as a GPU does.
    x, residual = (torch.randint(-16, 17, shape, device=device).to(dtype) / 8 for _ in range(2))
    weight = _normal(shape[1:], dtype, device)
    normed = rms_norm_reference((x + residual).float(), weight.float(), EPS)
    total = torch.empty_like(x)
    _assert_unrounded(lambda out, scales: launch_rms_norm(x, residual, weight, EPS, out, total, scales), normed)
    assert torch.equal(total, x + residual)
    *found, found_total = add_rms_norm_quantized_triton(x, residual, weight, EPS)
    *expected, expected_total = add_rms_norm_quantized_reference(x, residual, weight, EPS)
    assert torch.equal(found_total, expected_total)
    _assert_codes(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = _normal(shape, dtype, device)
    _assert_unrounded(lambda out, scales: launch_silu_mul(gate_up, out, scales), silu_mul_reference(gate_up.float()))
    _assert_codes(silu_mul_quantized_triton(gate_up), silu_mul_quantized_reference(gate_up))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_mul(shape: tuple[int, int], device: torch.device) -> None:
    gate_up = _normal(shape, torch.float32, device)
    _assert_codes(gelu_mul_quantized_triton(gate_up), gelu_mul_quantized_reference(gate_up))


@pytest.mark.parametrize("quantize", [quantize_rows_triton, quantize_rows_reference])
def test_codes_and_scales_are_exact_where_they_can_be(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> None:
    codes = torch.tensor([[448.0, -416.0, 1.0, 0.0, 2**-9], [-448.0, 0.5, 3.25, 2**-6, 7 * 2**-9]], device=device)
    exact = torch.tensor([[2.0], [0.125]], device=device)
    found, scales = quantize(codes * exact)
    assert found.dtype == FP8
    assert torch.equal(scales, exact)
    assert torch.equal(found.float(), codes)


@pytest.mark.parametrize("rows", [0, 1, 7, 32])
@pytest.mark.parametrize("biased", [True, False])
def test_scaled_linear(biased: bool, rows: int, device: torch.device) -> None:
    if device.type == "cuda" and not supported(device):
        pytest.skip("no FP8 tensor cores")
    x, weight = torch.randn(rows, 64, device=device), torch.randn(48, 64, device=device) * torch.rand(48, 1, device=device)
    bias = torch.randn(48, device=device).bfloat16() if biased else None
    (x_codes, x_scales), (weight_codes, weight_scales) = quantize_rows_reference(x), quantize_rows_reference(weight)
    found = scaled_linear(x_codes, x_scales, weight_codes, weight_scales, bias)
    wide = (x_codes.double() * x_scales) @ (weight_codes.double() * weight_scales).T + (0 if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wide, rtol=1e-2, atol=1e-2)
    exact = x @ weight.T + (0 if bias is None else bias)
    assert (found - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.gpu
def test_what_a_gpus_product_does_not_take() -> None:
    x, weight = quantize_rows(torch.randn(5, 64, device="cuda")), quantize_rows(torch.randn(40, 64, device="cuda"))
    with pytest.raises(ValueError, match=r"weight has shape \[40, 64\], where multiples of 16"):
        scaled_linear(*x, *weight)
    with pytest.raises(ValueError, match="a scale a row is bfloat16"):
        scaled_linear(*x, *weight, dtype=torch.float32)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _assert_unrounded(launch: Callable[[Tensor, Tensor], None], expected: Tensor) -> None:
    """The kernel's arithmetic: its codes before they are rounded, left in float32, and its scales."""
    out, scales = torch.empty_like(expected), expected.new_empty(len(expected), 1)
    launch(out, scales)
    torch.testing.assert_close(scales, expected.abs().amax(1, keepdim=True) / 448)
    torch.testing.assert_close(out * scales, expected, atol=1e-5, rtol=1e-5)
    assert (out.abs() <= 448).all()


def _assert_codes(found: tuple[Tensor, ...] | list[Tensor], expected: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Codes as they are stored. The interpreter loses a carry into the exponent: about one code in seventy is half its size."""
    (codes, scales), (expected_codes, expected_scales) = found, expected
    assert codes.dtype == FP8
    torch.testing.assert_close(scales, expected_scales)
    assert int((codes.float() != expected_codes.float()).sum()) <= 0.06 * codes.numel()
    torch.testing.assert_close(codes.float(), expected_codes.float(), atol=2**-9, rtol=0.13 if codes.is_cuda else 0.51)
