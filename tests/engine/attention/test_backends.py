"""Every backend against the reference, step after step on shared and scattered slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import FlashInferAttention, problem, send
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.core import EMPTY, Ints, Request, Run, as_ints
from engine.memory.kv import KVCache

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYERS = 2
CPU = torch.device("cpu")

Backend = Callable[[KVCache, int], AttentionBackend]


@dataclass
class Pool:
    """Free slots, in no order."""

    free: Ints

    def take(self, count: int) -> Ints:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken


def run(context: Ints, new: int) -> Run:
    return Run(Request(id="r", prefix=EMPTY), None, np.zeros(new, np.int32), context)


def steps(generator: np.random.Generator, slots: int, longest: int) -> list[list[Run]]:
    """Two queries with items, in the same step and, cached, in the next; a prompt in chunks; two sequences that are decoded."""
    pool = Pool(generator.permutation(slots).astype(np.int32))
    lengths = generator.integers(1, longest, 4)
    queries = [pool.take(length) for length in lengths[:2]]
    prompt, cut = pool.take(lengths[2] + 3), int(generator.integers(1, lengths[2] + 2))
    item_lengths = generator.integers(1, 40, 6)

    def items() -> list[Run]:
        return [run(as_ints([queries[nth % 2], pool.take(length)]), length) for nth, length in enumerate(item_lengths)]

    first = [run(query, len(query)) for query in queries] + items() + [run(prompt[:cut], cut)]
    second = [run(prompt[:-2], len(prompt) - 2 - cut), *items()] if cut < len(prompt) - 2 else items()
    return [first, second, [run(prompt[:-1], 1)], [run(prompt, 1), *items()[:1]]]


def attended(backend: AttentionBackend, runs: list[Run], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[layers, tokens, heads, head_dim]; each layer has its own."""
    attend = backend.plan(runs)
    device = backend.kv.keys.device
    return torch.stack([attend(layer, *(part[layer].to(device) for part in (q, k, v))).cpu() for layer in range(LAYERS)])


def compare(
    make: Backend, device: torch.device, seed: int, longest: int, group: int, head_dim: int, dtype: torch.dtype, kv_heads: int = 2
) -> None:
    generator = np.random.default_rng(seed)
    slots, heads = 4 * longest + 600, group * kv_heads
    backend, reference = (
        kind(KVCache(layers=LAYERS, slots=slots, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=place), heads)
        for kind, place in ((make, device), (ReferenceAttention, CPU))
    )
    for runs in steps(generator, slots, longest):
        tokens = sum(len(one.tokens) for one in runs)
        q = torch.randn(LAYERS, tokens, heads, head_dim).to(dtype)
        k, v = torch.randn(2, LAYERS, tokens, kv_heads, head_dim).to(dtype)
        found, expected = attended(backend, runs, q, k, v), attended(reference, runs, q, k, v)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(backend.kv.keys.cpu(), reference.kv.keys)
    assert torch.equal(backend.kv.values.cpu(), reference.kv.values)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (2, 128), (4, 64), (8, 32)])
def test_triton(group: int, head_dim: int, device: torch.device) -> None:
    compare(TritonAttention, device, group, 150, group, head_dim, torch.float32)


def test_triton_in_half_precision(device: torch.device) -> None:
    compare(TritonAttention, device, 0, 150, 2, 64, torch.float16, kv_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_triton_on_many_layouts(seed: int, device: torch.device) -> None:
    group, head_dim = [1, 2, 4, 8, 7][seed], [32, 64, 128][seed % 3]
    compare(TritonAttention, device, seed, 400, group, head_dim, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_triton_on_long_layouts(group: int, dtype: torch.dtype, device: torch.device) -> None:
    compare(TritonAttention, device, group, 20_000, group, 128, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("longest", [150, 20_000])
def test_flashinfer(longest: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    if reason := problem(device, 128, dtype):
        pytest.skip(f"FlashInfer: {reason}")
    compare(FlashInferAttention, device, group, longest, group, 128, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [TritonAttention, FlashInferAttention])
def test_a_step_does_not_wait_for_the_gpu(make: type[TritonAttention] | type[FlashInferAttention], device: torch.device) -> None:
    if make is FlashInferAttention and (reason := problem(device, 128, torch.bfloat16)):
        pytest.skip(f"FlashInfer: {reason}")
    kv = KVCache(layers=1, slots=2000, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device=device)
    backend = make(kv, 4)
    runs = [run(np.arange(1000, dtype=np.int32), 1), run(np.arange(1000, 1200, dtype=np.int32), 200)]
    q, k, v = (torch.randn(201, heads, 128, device=device).bfloat16() for heads in (4, 2, 2))
    backend.plan(runs)(0, q, k, v)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(runs)(0, q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tables_travel_as_one() -> None:
    """Each as it was, and at a multiple of 16 bytes."""
    tables = [np.arange(size, dtype=np.int32) for size in (1, 0, 5, 4, 2)]
    sent = send(tables, CPU)
    assert [part.tolist() for part in sent] == [table.tolist() for table in tables]
    assert len({part.untyped_storage().data_ptr() for part in sent}) == 1
    assert all(part.storage_offset() % 4 == 0 for part in sent)
