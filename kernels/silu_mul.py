"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) · up`` of gate ‖ up side by side. gate_up: [tokens, 2 · size] -> [tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
