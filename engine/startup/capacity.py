"""Numbers of slots and of running requests that fit the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device import cgroup
from engine.models.decoder import Decoder
from engine.runner.graphs import BUCKETS
from engine.settings import GPU_BATCHED_TOKENS, MAX_RUNNING_REQUESTS, RUNNING_REQUESTS

MAX_SLOTS = 131_072
"""Most slots on a CPU."""
MEMORY_SHARE, GPU_MEMORY_SHARE = 0.25, 0.8
GPU_FIXED_BYTES = 1 << 30
"""Workspaces of attention and products, loaded kernels, and logits of 256 rows."""
SLOTS_A_REQUEST = 1024
"""Tokens of a request, prompt and output, where the default number of running requests fills the slots."""
LOGIT_COPIES = 4
"""Float32 tensors as large as the logits, while a step draws."""


def default_slots(
    decoders: Sequence[Decoder], kept: Sequence[torch.dtype], processes: int, tokens: int = GPU_BATCHED_TOKENS
) -> int:
    """Return the number of slots for which a share of the free memory suffices. A slot has keys and values in all ``decoders``,
    those of each in its dtype of ``kept``. On a CPU all ``processes``, those of other engines here included, share one memory;
    on GPUs each has its own.

    On a GPU that a model nearly fills, the share is less, so that steps of ``tokens`` have what they need.
    """
    weight = decoders[0].embed.weight
    size = sum(map(slot_bytes, decoders, kept))
    if weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weight.device)
        needed = GPU_FIXED_BYTES + max(step_bytes(decoder, tokens + BUCKETS[-1]) for decoder in decoders)
        return max(1024, int(min(free * GPU_MEMORY_SHARE, free - needed)) // size)
    return max(1024, min(MAX_SLOTS, int(cgroup.available_memory() * MEMORY_SHARE) // (processes * size)))


def default_running_requests(decoders: Sequence[Decoder], slots: int, tokens: int) -> int:
    """Return the number of requests to compute at once: on a GPU as many as fill the slots and leave memory for their logits, when
    the slots of ``decoders[0]`` are allocated and those of a length model are not."""
    weight, config = decoders[0].embed.weight, decoders[0].config
    if weight.device.type != "cuda":
        return RUNNING_REQUESTS
    free, _ = torch.cuda.mem_get_info(weight.device)
    others = sum(slots * slot_bytes(decoder, decoder.embed.weight.dtype) for decoder in decoders[1:])
    spare = free - others - GPU_FIXED_BYTES - max(step_bytes(decoder, tokens + BUCKETS[-1]) for decoder in decoders)
    more = max(0, spare) // (LOGIT_COPIES * torch.float32.itemsize * config.vocab_size)
    return max(RUNNING_REQUESTS, min(MAX_RUNNING_REQUESTS, slots // SLOTS_A_REQUEST, RUNNING_REQUESTS + more))


def slot_bytes(decoder: Decoder, kept: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in this process."""
    config = decoder.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kept.itemsize


def step_bytes(decoder: Decoder, tokens: int) -> int:
    """Return the bytes of a step's tensors where most of them are alive: in attention or behind the gate of a layer's feed-forward
    part. The memory of CUDA graphs is apart and has those of their largest step."""
    config = decoder.config
    attention = (3 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # projected heads, queries, output
    inner = 3 * config.intermediate_size  # gate and up, and their product
    if config.experts is not None:
        # As much for each chosen expert, or their outputs, in the model's dtype and twice in float32.
        inner = max(inner, config.experts.chosen * max(3 * config.experts.size, 5 * config.hidden_size))
    return tokens * (4 * config.hidden_size + max(attention, inner)) * decoder.embed.weight.dtype.itemsize
