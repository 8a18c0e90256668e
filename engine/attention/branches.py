"""Branches of one token on a GPU, for every backend there: :mod:`kernels.branch_attention` over a step's prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core import EMPTY, Ints
from engine.memory.kv import KVCache
from engine.models.decoder import PlainAttend
from kernels.attention_layout import cumulate
from kernels.branch_attention import MAX_ROWS, branch_attention_triton


def plan_branches(kv: KVCache, group: int, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
    """As :meth:`AttentionBackend.plan_branches`; group: query heads a key head.

    Where the kernel's block does not hold all branches of a prefix, the prefix is a row for each part of them.
    """
    width = branches[0]
    assert all(count == width for count in branches), "a GPU takes the same number of branches for each prefix"
    part = min(width, 1 << (MAX_ROWS // group).bit_length() - 1)
    parts = -(-width // part)
    pointers, slots = _tables([prefix for prefix in prefixes for _ in range(parts)], kv.keys.device)
    if parts > 1:
        first = torch.arange(parts, device=counts.device) * part
        counts = (counts.unsqueeze(1) - first).clamp(0, part).flatten()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return branch_attention_triton(q, k, v, kv.keys[layer], kv.values[layer], pointers, slots, counts)

    return attend


def _tables(prefixes: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each prefix begins in the list of all slots, and that list: int64 on ``device``, in one copy that nobody waits for."""
    pointers = cumulate(np.array([len(prefix) for prefix in prefixes], np.int64))
    packed = torch.from_numpy(np.concatenate([pointers, EMPTY, *prefixes]).astype(np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return packed[: len(pointers)], packed[len(pointers) :]
