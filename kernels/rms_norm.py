"""Root-mean-square normalisation, alone and fused with the addition of a residual.

Source of the formula: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis, summed in float32. x: [..., size], weight: [size]."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised sum and the sum itself: ``(rms_norm(x + residual), x + residual)``, each of x's shape."""
    total = x + residual
    return rms_norm(total, weight, eps), total
