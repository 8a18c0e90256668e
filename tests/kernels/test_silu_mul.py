"""The gate of the feed-forward layer: the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import silu_mul_reference, silu_mul_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 128), (2, 3000), (1, 2), (0, 64)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(shape, device=device).to(dtype) * 3
    expected = silu_mul_reference(gate_up.float()).to(dtype)
    torch.testing.assert_close(silu_mul_triton(gate_up), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_far_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 0.0, 2.0, 3.0, 4.0]], device=device)
    torch.testing.assert_close(silu_mul_triton(gate_up), torch.tensor([[0.0, 240.0, 0.0]], device=device))


def test_arguments_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"gate_up has shape \[3, 7\], where \[3, 6\] is expected"):
        silu_mul_triton(torch.randn(3, 7, device=device))
