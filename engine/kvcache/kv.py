"""Tensors of the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import FP8


class KVCache:
    """Keys and values of every slot in every layer, [layers, slots + 1, kv_heads, head_dim] each, allocated once.

    The last slot is never allocated: padding is written there, and nothing reads it.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Tensor | None = None,
    ) -> None:
        """``dtype``: the model's. ``scales``: [layers, 2, kv_heads] float32, see :func:`engine.models.kv_scales.kv_scales`.
        With them, keys and values are FP8 codes (:mod:`kernels.kv_codes`)."""
        self.slots = slots
        self.dtype = dtype
        self.scales = scales
        shape = (layers, slots + 1, kv_heads, head_dim)
        # Zeros: a masked read of a slot that was never written must not return NaN.
        kept = dtype if scales is None else FP8
        self.keys = torch.zeros(shape, dtype=kept, device=device)
        self.values = torch.zeros(shape, dtype=kept, device=device)

    def value_scales(self, layer: int) -> Tensor | None:
        """[kv_heads] float32; None where values are not codes."""
        return None if self.scales is None else self.scales[layer, 1]

    @property
    def padding_slot(self) -> int:
        """Slot that padding is written to."""
        return self.slots
