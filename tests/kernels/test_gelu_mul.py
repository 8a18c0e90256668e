"""The gate of a GeGLU layer: the kernel against PyTorch's own GELU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from kernels.gelu_mul import gelu_mul, gelu_mul_reference, gelu_mul_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 128), (2, 3000), (1, 2), (0, 64)], ids=str)
def test_gelu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(shape, device=device).to(dtype) * 3
    gate, up = gate_up.float().chunk(2, -1)
    expected = (gelu(gate, approximate="tanh") * up).to(dtype)
    torch.testing.assert_close(gelu_mul_triton(gate_up), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(gelu_mul_reference(gate_up), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_far_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 0.0, 2.0, 3.0, 4.0]], device=device)
    torch.testing.assert_close(gelu_mul_triton(gate_up), torch.tensor([[0.0, 240.0, 0.0]], device=device))


def test_gradients_flow() -> None:
    gate_up = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu_mul, gate_up)
