"""Memory for slots on a GPU: what a step needs beside them is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.models.config import ModelConfig
from engine.models.rope import Rope
from engine.runner.graphs import BUCKETS
from engine.runner.machine import GPU_FIXED_BYTES, default_running_requests, default_slots, slot_bytes, step_bytes
from engine.settings import GPU_BATCHED_TOKENS

GIB = 1 << 30
LLAMA_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_context=131_072,
    rope=Rope(500_000.0),
)


def decoder(config: ModelConfig) -> Any:
    return SimpleNamespace(
        config=config, embed=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16))
    )


def slots(config: ModelConfig, free: int, monkeypatch: pytest.MonkeyPatch, decoders: Sequence[Any] = ()) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    decoders = decoders or [decoder(config)]
    return default_slots(decoders, [torch.bfloat16] * len(decoders), 1)


def test_the_largest_step_and_the_largest_graph_have_room_beside_weights_that_nearly_fill_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of Llama 70B takes 66 GiB of 79."""
    half = replace(LLAMA_70B, intermediate_size=14_336, num_heads=32, num_kv_heads=4)
    needed = GPU_FIXED_BYTES + step_bytes(decoder(half), GPU_BATCHED_TOKENS + BUCKETS[-1])
    assert 2 * GIB < needed < 3 * GIB
    size = slot_bytes(decoder(half), torch.bfloat16)
    assert slots(half, 10 * GIB, monkeypatch) * size <= 10 * GIB - needed
    assert slots(half, 20 * GIB, monkeypatch) * size > 15 * GIB
    assert slots(half, 2 * GIB, monkeypatch) == 1024
    both = [decoder(replace(half, num_layers=2)), decoder(half)]
    assert slots(half, 10 * GIB, monkeypatch, both) < slots(half, 10 * GIB, monkeypatch), "of two models, the one that needs more"


@pytest.mark.parametrize(
    ("slots", "left", "expected"),
    [
        (100_000, 40, 256),
        (350_000, 12, 341),
        (2_000_000, 12, 1024),
        (2_000_000, 1, 256),
    ],
    ids=["few slots", "slots", "most", "no memory for logits"],
)
def test_as_many_requests_run_as_fill_the_slots_of_a_gpu(
    slots: int, left: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``left``: GiB that the slots leave."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left * GIB, 80 * GIB))
    small = replace(LLAMA_70B, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32)
    assert default_running_requests([decoder(small)], slots, GPU_BATCHED_TOKENS) == expected


def test_a_length_model_and_logits_take_memory_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(replace(LLAMA_70B, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16))
    needed = GPU_FIXED_BYTES + step_bytes(model, GPU_BATCHED_TOKENS + BUCKETS[-1])
    rows = 100 * 16 * model.config.vocab_size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed + rows, 80 * GIB))
    assert default_running_requests([model], 1_000_000, GPU_BATCHED_TOKENS) == 356
    assert default_running_requests([model, model], 1_000_000, GPU_BATCHED_TOKENS) == 256
