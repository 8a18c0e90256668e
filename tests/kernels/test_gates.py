"""The gates of feed-forward layers, SiLU and GELU: kernels and references against PyTorch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from yardstick_llm.kernels.gelu_mul import gelu_mul, gelu_mul_reference, gelu_mul_triton
from yardstick_llm.kernels.silu_mul import silu_mul, silu_mul_reference, silu_mul_triton

Gate = Callable[[Tensor], Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GATES: dict[str, tuple[Gate, Gate, Gate, Gate]] = {
    "silu": (silu_mul_triton, silu_mul_reference, silu, silu_mul),
    "gelu": (gelu_mul_triton, gelu_mul_reference, lambda gate: gelu(gate, approximate="tanh"), gelu_mul),
}
"""Kernel, reference, definition, and the operation that chooses."""


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 128), (2, 3000), (1, 2), (0, 64)], ids=str)
def test_gates(gates: tuple[Gate, ...], shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    kernel, reference, definition, _ = gates
    gate_up = torch.randn(shape, device=device).to(dtype) * 3
    gate, up = gate_up.float().chunk(2, -1)
    for operation in (kernel, reference):
        expected = (definition(gate) * up).to(dtype)
        torch.testing.assert_close(operation(gate_up), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
def test_far_gates_and_gradients(gates: tuple[Gate, ...], device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 0.0, 2.0, 3.0, 4.0]], device=device)
    torch.testing.assert_close(gates[0](gate_up), torch.tensor([[0.0, 240.0, 0.0]], device=device))
    assert torch.autograd.gradcheck(gates[3], torch.randn(2, 6, dtype=torch.float64, requires_grad=True))
