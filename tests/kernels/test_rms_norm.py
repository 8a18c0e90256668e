"""RMS normalisation: the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from yardstick_llm.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

# The interpreter cuts float32 off where a GPU rounds it to bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 512), (5, 1000), (0, 64), (2, 8192), (3, 5, 64), (2, 20, 128), (2, 3, 80)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(shape, dtype=dtype, device=device), torch.randn(shape[-1], dtype=dtype, device=device)
    found, expected = rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_weights_in_float32(device: torch.device) -> None:
    """Weights that are stored as differences from 1 need more digits than the rows."""
    x, weight = torch.randn(5, 512, dtype=torch.float16, device=device), 1 + torch.randn(512, device=device) / 1000
    expected = torch.nn.functional.rms_norm(x.float(), (512,), weight, EPS)
    for found in (rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS)):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 512), (2, 3000), (0, 64)], ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    found, expected = add_rms_norm_triton(x, residual, weight, EPS), add_rms_norm_reference(x, residual, weight, EPS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_arguments_are_checked(device: torch.device) -> None:
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \[7\], where \[8\] is expected"):
        rms_norm_triton(x, weight[:7], EPS)
    with pytest.raises(ValueError, match=r"weight is torch.float16, where torch.float32 is expected"):
        rms_norm_triton(x, weight.half(), EPS)
    with pytest.raises(ValueError, match=r"x is torch.float64, where torch.float32 or torch.float16 or torch.bfloat16"):
        rms_norm_triton(x.double(), weight, EPS)
    with pytest.raises(ValueError, match=r"residual of shape \[4, 8\] has strides \[1, 4\]: make it contiguous"):
        add_rms_norm_triton(x, torch.randn(8, 4, device=device).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"x of shape \[4, 8\] has strides \[16, 2\]: make it contiguous"):
        rms_norm_triton(torch.randn(4, 16, device=device)[:, ::2], weight, EPS)
    with pytest.raises(ValueError, match=r"x has shape \[8\], where \[tokens, size\] or \[tokens, heads, size\] is expected"):
        rms_norm_triton(weight, weight, EPS)
    with pytest.raises(ValueError, match=r"weight is on meta, where .* is expected"):
        rms_norm_triton(x, weight.to("meta"), EPS)
    with pytest.raises(ValueError, match=r"Triton's kernels run on an NVIDIA GPU, and x is on meta: use the reference"):
        rms_norm_triton(x.to("meta"), weight, EPS)


def test_a_gradient_takes_the_reference(device: torch.device) -> None:
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    torch.autograd.backward(rms_norm(x, weight, EPS).sum())
    assert weight.grad is not None
