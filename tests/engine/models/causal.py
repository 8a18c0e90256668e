"""Plain causal attention for tests and the decoder's ``attend``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Attend


def causal_rows(batch: int) -> Attend:
    """``attend`` for ``batch`` sequences of equal length, one after the other in the flat run."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))  # [batch, heads, time, head_dim]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return attend


causal = causal_rows(1)
"""``attend`` for one sequence."""


def causal_of(config: ModelConfig) -> Attend:
    """``attend`` for one sequence, with the windows, scales and soft caps of a model."""
    if config.attends_plainly:
        return causal

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = config.attention_specs[layer]
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale_of(q.shape[2])
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh() if spec.soft_cap else scores
        distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        hidden = (distance < 0) | (distance >= (spec.window or len(k)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    return attend
