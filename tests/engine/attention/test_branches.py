"""Branches of one token: each backend against runs of one token on the same prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.device import no_waiting
from yardstick_llm.engine.ints import EMPTY
from yardstick_llm.engine.models.decoder import Heads
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.runner.attention.triton import TritonAttention

LAYERS, KV_HEADS = 2, 2


def compare(make: type[AttentionBackend], device: torch.device, branches: list[int], group: int, head_dim: int) -> None:
    """Real branches attend as runs that write their keys to slots of their own; the cache stays as it is."""
    generator = np.random.default_rng(len(branches))
    free, heads = generator.permutation(2000).astype(np.int32), group * KV_HEADS
    shared, places = free[:37], iter(free[400:])
    prefixes = [np.concatenate([shared, free[40 : 41 + 9 * row]]) for row in range(len(branches))]
    backend = make(
        KVCache(layers=LAYERS, slots=2000, kv_heads=KV_HEADS, head_dim=head_dim, dtype=torch.float32, device=device), heads
    )
    plain = ReferenceAttention(KVCache(layers=LAYERS, slots=2000, kv_heads=KV_HEADS, head_dim=head_dim, dtype=torch.float32), heads)
    for name in ("keys", "values"):
        filled = getattr(plain.kv, name).normal_()
        getattr(backend.kv, name).copy_(filled)
    before = backend.kv.keys.clone()
    total = sum(branches)
    q = torch.randn(LAYERS, total, heads, head_dim)
    k, v = torch.randn(2, LAYERS, total, KV_HEADS, head_dim)
    rows = [row for row, count in enumerate(branches) for _ in range(count)]
    segments = [
        ExtendSegment(
            Request(id="r", prefix=EMPTY), None, np.zeros(1, np.int32), np.append(prefixes[row], next(places)).astype(np.int32)
        )
        for row in rows
    ]
    turn = torch.ones(total, head_dim // 2), torch.zeros(total, head_dim // 2)  # none
    expected = plain.plan(segments).attend
    counts = torch.tensor([max(1, count - row) for row, count in enumerate(branches)], device=device)
    attend = backend.plan_branches(prefixes, branches, counts)
    nth = torch.tensor([place for count in branches for place in range(count)])
    real = nth < counts.cpu()[rows]
    for layer in range(LAYERS):
        found = attend(layer, *(part[layer].to(device) for part in (q, k, v))).cpu()
        heads_of_all = Heads(torch.cat([q[layer], k[layer], v[layer]], 1), KV_HEADS, None, None, 0.0, *turn)
        torch.testing.assert_close(found[real], expected(layer, heads_of_all)[real], atol=1e-5, rtol=1e-5)
    assert torch.equal(backend.kv.keys, before)


@pytest.mark.parametrize("branches", [[1], [5, 1, 3, 3, 8, 2], [4] * 5, [2, 64]])
def test_reference(branches: list[int]) -> None:
    compare(ReferenceAttention, torch.device("cpu"), branches, 2, 16)


@pytest.mark.parametrize(("branches", "group"), [([8, 8, 8], 1), ([2] * 4, 4), ([8, 8], 16)])
def test_triton(branches: list[int], group: int, device: torch.device) -> None:
    """The last is the most that the kernel's block holds."""
    compare(TritonAttention, device, branches, group, 32)


@pytest.mark.gpu
def test_planning_does_not_wait_for_the_gpu(device: torch.device) -> None:
    kv = KVCache(layers=1, slots=2000, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device=device)
    backend = TritonAttention(kv, 4)
    counts = torch.tensor([3, 8], device=device)
    q, k, v = (torch.randn(16, heads, 128, device=device).bfloat16() for heads in (4, 2, 2))
    prefixes = [np.arange(700, dtype=np.int32), np.arange(30, dtype=np.int32)]
    backend.plan_branches(prefixes, [8, 8], counts)(0, q, k, v)  # compiles
    torch.cuda.synchronize()
    with no_waiting():
        backend.plan_branches(prefixes, [8, 8], counts)(0, q, k, v)
