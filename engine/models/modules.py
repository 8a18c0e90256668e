"""Modules that layers are made of: linear layers, embeddings and norms; and the head for tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from kernels.linear import PackedWeight, linear
from kernels.lora_layout import LoraDelta
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.soft_cap import soft_cap


class Linear(nn.Linear):
    """A linear layer whose weights are allocated and not initialised; the code that builds it fills them."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return linear(x, self.weight, self.bias)


class Unadded(NamedTuple):
    """Output of a projection, and additions of LoRA adapters that the operation behind it makes."""

    y: Tensor
    """[rows, out]"""
    delta: LoraDelta


class Embedding(nn.Embedding):
    """An embedding whose weights are allocated and not initialised."""

    def reset_parameters(self) -> None:
        pass


class TokenHead(NamedTuple):
    """A language-model head: the model's, or an adapter's."""

    weight: Tensor
    """[vocab, hidden]"""
    operand: Tensor | PackedWeight
    """See :attr:`engine.models.decoder.Decoder.head_operand`."""
    divisor: float
    cap: float
    """Soft cap of the logits."""

    def input(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as the decoder returns them. -> the rows whose products with the weight are uncapped logits."""
        return hidden if self.divisor == 1.0 else hidden / self.divisor

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], as the decoder returns them. -> [rows, vocab]"""
        return soft_cap(linear(self.input(hidden), self.operand), self.cap)


class RMSNorm(nn.Module):
    """The weight of a root-mean-square normalisation, ones at first.

    If the checkpoint stores the difference to 1, the weight is in float32, because the sum has more digits than the model's dtype.
    """

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.offset = config.norm_offset
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32 if self.offset else dtype))
        self.eps = config.norm_eps

    @torch.no_grad()
    def add_offset(self) -> None:
        """Make the weight from what a checkpoint stores, which was copied into it."""
        if self.offset:
            self.weight.add_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum)"""
        return add_rms_norm(x, residual, self.weight, self.eps)


class NoNorm(nn.Module):
    """Takes the place of a norm that a model does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] -> the same"""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, sum)"""
        total = x + residual
        return total, total
