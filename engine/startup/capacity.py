"""Number of slots that fit the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device import cgroup
from engine.models.decoder import Decoder

MAX_SLOTS = 131_072
"""Most slots on a CPU."""
MEMORY_SHARE, GPU_MEMORY_SHARE = 0.25, 0.8


def default_slots(decoders: Sequence[Decoder], kept: Sequence[torch.dtype], processes: int) -> int:
    """Return the number of slots for which a share of the free memory suffices. A slot has keys and values in all ``decoders``,
    those of each in its dtype of ``kept``. On a CPU all processes share one memory; on GPUs each has its own.
    """
    weight = decoders[0].embed.weight
    size = sum(map(slot_bytes, decoders, kept))
    if weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weight.device)
        return max(1024, int(free * GPU_MEMORY_SHARE) // size)
    return max(1024, min(MAX_SLOTS, int(cgroup.available_memory() * MEMORY_SHARE) // (processes * size)))


def slot_bytes(decoder: Decoder, kept: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in this process."""
    config = decoder.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kept.itemsize
