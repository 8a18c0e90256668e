"""The tensors behind the slots."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every slot in every layer, [layers, slots, kv_heads, head_dim] each, allocated once."""

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        # Zeros, so that reading a slot nobody has written, under a mask, cannot bring in a NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots: [tokens] int64; keys, values: [tokens, kv_heads, head_dim]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)
