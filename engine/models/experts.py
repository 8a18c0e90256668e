"""Mixture of experts: a layer's feed-forward part, of which a router chooses a few experts for each token.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", arXiv 1701.06538; the shared expert is that of Qwen2-MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.errors import ModelError
from engine.models.modules import Linear
from kernels.grouped_experts import Blocks, block_pairs, grouped_linear, route
from kernels.silu_mul import silu_mul


def refuse_experts(config: ModelConfig, option: str) -> None:
    """Raise :class:`ModelError` for a model with experts, which ``option`` does not support."""
    if config.experts is not None:
        raise ModelError(f"{option} does not support mixtures of experts such as {config.architecture}; leave it out.")


class GroupedLinear(nn.Module):
    """A matrix for each expert, uninitialised."""

    bias = None

    def __init__(self, experts: int, size: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, columns, size, dtype=dtype))

    def forward(self, x: Tensor, experts: Tensor, blocks: Blocks | None, *, by_pair: bool = False) -> Tensor:
        """See :func:`kernels.grouped_experts.grouped_linear`."""
        return grouped_linear(x, self.weight, experts, blocks, by_pair=by_pair)


class Experts(nn.Module):
    """Router, experts and, in some families, an expert that all tokens pass, weighted by a gate."""

    def __init__(self, config: ModelConfig, shared: nn.Module | None, dtype: torch.dtype) -> None:
        """``shared``: the shared expert's feed-forward layer."""
        super().__init__()
        experts = config.experts
        assert experts is not None
        hidden, size = config.hidden_size, experts.size
        self.chosen, self.renormalise = experts.chosen, experts.renormalise
        self.held = experts.held or range(experts.count)
        """Experts whose matrices are here. Rows of others count as zero, which other processes add."""
        self.are_all_held = len(self.held) == experts.count
        self.router = Linear(hidden, experts.count, bias=False, dtype=dtype)
        self.gate_up = GroupedLinear(len(self.held), hidden, 2 * size, dtype)
        self.gate: Callable[[Tensor], Any] = silu_mul
        """gate ‖ up, [pairs, 2 · size] -> input of :attr:`down`"""
        self.down = GroupedLinear(len(self.held), size, hidden, dtype)
        self.input: Callable[[Tensor], Any] | None = None
        """[tokens, hidden] -> input of :attr:`gate_up` and of the shared expert; None: as it is"""
        self.shared = shared
        self.shared_gate = None if shared is None else Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        experts, weights = route(self.router(x), self.chosen, renormalise=self.renormalise)
        if not self.are_all_held:
            elsewhere = (experts < self.held.start) | (experts >= self.held.stop)
            experts = (experts - self.held.start).masked_fill(elsewhere, len(self.held))
        rows = x if self.input is None else self.input(x)
        blocks = block_pairs(experts, len(self.held)) if experts.is_cuda else None
        inner = self.gate(self.gate_up(rows, experts, blocks))
        found = self.down(inner, experts, blocks, by_pair=True).view(len(x), self.chosen, -1)
        if not self.are_all_held:
            found = found.masked_fill(elsewhere.unsqueeze(2), 0)
        out: Tensor = (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + self.shared_gate(x).sigmoid() * self.shared(rows)  # type: ignore[no-any-return]
