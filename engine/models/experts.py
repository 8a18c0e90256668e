"""Mixture of experts: a layer's feed-forward part, of which a router chooses a few experts for each token.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", arXiv 1701.06538; the shared expert is that of Qwen2-MoE.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.errors import ModelError
from engine.models.modules import Linear
from kernels.grouped_experts import grouped_linear, route
from kernels.silu_mul import silu_mul


def refuse_experts(config: ModelConfig, option: str) -> None:
    """Raise :class:`ModelError` for a model with experts, which ``option`` does not support."""
    if config.experts is not None:
        raise ModelError(f"{option} does not support mixtures of experts such as {config.architecture}; leave it out.")


class Experts(nn.Module):
    """Router, experts and, in some families, an expert that all tokens pass, weighted by a gate."""

    def __init__(self, config: ModelConfig, shared: nn.Module | None, dtype: torch.dtype) -> None:
        """``shared``: the shared expert's feed-forward layer."""
        super().__init__()
        experts = config.experts
        assert experts is not None
        hidden, size = config.hidden_size, experts.size
        self.chosen, self.renormalise = experts.chosen, experts.renormalise
        self.router = Linear(hidden, experts.count, bias=False, dtype=dtype)
        self.gate_up = nn.Parameter(torch.empty(experts.count, 2 * size, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts.count, hidden, size, dtype=dtype))
        self.shared = shared
        self.shared_gate = None if shared is None else Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        experts, weights = route(self.router(x), self.chosen, renormalise=self.renormalise)
        inner = silu_mul(grouped_linear(x, self.gate_up, experts))
        found = grouped_linear(inner, self.down, experts, by_pair=True).view(len(x), self.chosen, -1)
        out = (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + self.shared_gate(x).sigmoid() * self.shared(x)  # type: ignore[no-any-return]
