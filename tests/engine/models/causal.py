"""Plain causal attention for tests and the decoder's ``attend``."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.models.decoder import Attend


def causal_rows(batch: int) -> Attend:
    """``attend`` for ``batch`` sequences of equal length, one after the other in the flat run."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))  # [batch, heads, time, head_dim]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return attend


causal = causal_rows(1)
"""``attend`` for one sequence."""
