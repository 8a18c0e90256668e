"""Attention of runs over slots: the kernel against the reference, the reference against its formula, and how work is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.depth import seeds
from yardstick_llm.kernels import attention_layout
from yardstick_llm.kernels.attention_layout import FEW_NARROW, MOST_MERGES, MOST_NARROW, Layout, Room, lay_out
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.paged_attention import block_rows, paged_attention, paged_attention_reference, paged_attention_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SLOTS = 1500

MIXED = [(1, 1), (1, 300), (5, 5), (40, 90), (3, 131), (2, 2)]
"""(queries, context): a lone token, decoding, prompts, and chunks of prompts."""


def layout_of(shapes: list[tuple[int, int]], q: Tensor, keys: Tensor, seed: int = 0) -> Layout:
    """Contexts are drawn each for itself, so that they share slots."""
    generator = np.random.default_rng(seed)
    contexts = [generator.permutation(len(keys))[:context] for _, context in shapes]
    heads, kv_heads = q.shape[1], keys.shape[1]
    rows = block_rows(q.shape[2], q.dtype)
    return lay_out([n for n, _ in shapes], contexts, group=heads // kv_heads, kv_heads=kv_heads, rows=rows).to(q.device)


def tensors(
    shapes: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    group: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    slots: int = SLOTS,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(sum(n for n, _ in shapes), group * kv_heads, head_dim, device=device).to(dtype)
    keys, values = torch.randn(2, slots, kv_heads, head_dim, device=device).to(dtype)
    return q, keys, values


def check(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, spec: AttentionSpec = PLAIN) -> None:
    found = paged_attention_triton(q, keys, values, layout, spec=spec)
    expected = paged_attention_reference(q, keys, values, layout, spec=spec)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])


@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(scale=0.3, window=4, soft_cap=1.5)], ids=["plain", "spec"])
def test_reference_is_the_formula(spec: AttentionSpec) -> None:
    """Token by token in float64."""
    q, keys, values = tensors(MIXED, torch.device("cpu"), kv_heads=2)
    layout = layout_of(MIXED, q, keys)
    found = paged_attention(q, keys, values, layout, spec=spec)
    qo_indptr, kv_indptr = layout.qo_indptr.tolist(), layout.kv_indptr.tolist()
    for segment, (queries, context) in enumerate(MIXED):
        for nth in range(queries):
            seen = layout.kv_indices[kv_indptr[segment] : kv_indptr[segment + 1]][: context - queries + nth + 1]
            seen = seen[-spec.window :] if spec.window else seen
            for head in range(4):
                scores = keys[seen, head // 2].double() @ q[qo_indptr[segment] + nth, head].double()
                scores = scores * (spec.scale or 32**-0.5)
                weights = (spec.soft_cap * (scores / spec.soft_cap).tanh() if spec.soft_cap else scores).softmax(0)
                expected = weights @ values[seen, head // 2].double()
                torch.testing.assert_close(found[qo_indptr[segment] + nth, head].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (1, 128), (2, 64), (3, 32), (4, 128), (7, 32), (8, 64)])
def test_groups_and_head_dims(group: int, head_dim: int, device: torch.device) -> None:
    q, keys, values = tensors(MIXED, device, group=group, head_dim=head_dim, kv_heads=1 if group > 2 else 2)
    check(q, keys, values, layout_of(MIXED, q, keys))


@pytest.mark.parametrize("window", [1, 90, 1000])
def test_windows(window: int, device: torch.device) -> None:
    """Windows that begin before a segment, within it, and behind the part of a context that some of several programs read."""
    shapes = [*MIXED, (1, 2000)]
    q, keys, values = tensors(shapes, device, slots=2500)
    layout = layout_of(shapes, q, keys)
    assert layout.partials > 2
    check(q, keys, values, layout, AttentionSpec(window=window))


@pytest.mark.parametrize("spec", [AttentionSpec(scale=0.4), AttentionSpec(soft_cap=1.5), AttentionSpec(0.4, 30, 1.5)], ids=str)
def test_scales_and_soft_caps(spec: AttentionSpec, device: torch.device) -> None:
    q, keys, values = tensors(MIXED, device)
    layout = layout_of(MIXED, q, keys)
    check(q, keys, values, layout, spec)
    plain, other = (paged_attention_reference(q, keys, values, layout, spec=each) for each in (PLAIN, spec))
    assert (plain - other).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    q, keys, values = tensors(MIXED, device, dtype, head_dim=64)
    check(q, keys, values, layout_of(MIXED, q, keys))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1200), (5, 1200), (100, 1200)], ids=["decoding", "few queries", "two tiles"])
def test_long_contexts_are_read_by_several_programs(shape: tuple[int, int], device: torch.device) -> None:
    """The first queries of a tile see nothing of the chunk that its last ones are in."""
    q, keys, values = tensors([shape, (1, 7)], device)
    layout = layout_of([shape, (1, 7)], q, keys)
    assert len(layout.merges) >= shape[0]
    check(q, keys, values, layout)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim"), [(3, 2, 32), (1, 1, 128), (5, 4, 128)], ids=["masked", "one", "two programs"]
)
def test_results_of_all_heads_are_merged(group: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    """By one program, which has room for a power of two of heads, or by several where they do not fit."""
    q, keys, values = tensors([(2, 600)], device, group=group, kv_heads=kv_heads, head_dim=head_dim)
    layout = layout_of([(2, 600)], q, keys)
    assert len(layout.merges) == 2
    check(q, keys, values, layout)


@pytest.mark.parametrize("context", [5_000, pytest.param(100_000, marks=pytest.mark.gpu)])
def test_decoding_far_into_a_context(context: int, device: torch.device) -> None:
    q, keys, values = tensors([(1, context)], device, slots=context)
    check(q, keys, values, layout_of([(1, context)], q, keys))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_long_prompts(dtype: torch.dtype, device: torch.device) -> None:
    shapes = [(2000, 20_000), (3000, 3000), (1, 20_000), *[(180, 300)] * 10, *[(1, 700)] * 50]
    q, keys, values = tensors(shapes, device, dtype, kv_heads=8, head_dim=128, slots=30_000)
    check(q, keys, values, layout_of(shapes, q, keys))


def test_large_scores(device: torch.device) -> None:
    """Thousands: their powers overflow unless taken relative to the largest."""
    q, keys, values = tensors([(4, 300)], device)
    layout = layout_of([(4, 300)], q, keys)
    found, expected = (
        paged_attention_triton(1000 * q, keys, values, layout),
        paged_attention_reference(1000 * q, keys, values, layout),
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_foreign_slots_are_not_read(device: torch.device) -> None:
    """Not even to be masked: zero times what is not finite is not zero."""
    q, keys, values = tensors(MIXED, device, slots=400)
    layout = layout_of(MIXED, q, keys)
    used = torch.zeros(401, dtype=torch.bool, device=device)
    used[1 + layout.kv_indices] = True  # one more slot, the first, is nobody's
    keys, values = (torch.cat([cache[:1], cache]).masked_fill(~used[:, None, None], torch.nan) for cache in (keys, values))
    shifted = replace(layout, kv_indices=layout.kv_indices + 1)
    assert paged_attention_triton(q, keys, values, shifted).isfinite().all()


def test_tables_of_fixed_size_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many queries and for more; padding has no item, and the padding slot for its own."""
    monkeypatch.setattr(attention_layout, "PROGRAMS", 16)
    shapes = [(1, 900), (30, 40), (2, 2)]
    q, keys, values = tensors(shapes, device)
    layout = layout_of(shapes, q, keys)
    assert len(layout.merges)
    expected = paged_attention_triton(q, keys, values, layout)
    for queries in (33, 50):
        room = Room.of(queries, group=2, kv_heads=1, rows=block_rows(32, q.dtype))
        packed = room.pack(layout_of(shapes, q.cpu(), keys.cpu()), 1499)
        assert packed is not None
        padded = room.within(packed.to(device))
        assert (padded.out_cache_loc[33:] == 1499).all()
        found = paged_attention_triton(torch.cat([q, q[: queries - 33]]), keys, values, padded)
        assert torch.equal(found[:33], expected)


@pytest.mark.parametrize("seed", seeds(quick=2, slow=4, deep=40))
def test_there_is_room_for_whatever_is_laid_out(seed: int) -> None:
    """But for more narrow items or merges than there is ever room for, and then nothing is packed."""
    generator = np.random.default_rng(seed)
    group, kv_heads, rows = int(generator.integers(1, 17)), int(generator.integers(1, 17)), [32, 128][seed % 2]
    for _ in range(10):
        contexts = generator.integers(1, [50, 3000, 30_000][generator.integers(3)], generator.integers(1, 300))
        lengths = np.minimum(generator.integers(1, [2, 40, 2000][generator.integers(3)], len(contexts)), contexts)
        layout = lay_out(
            lengths, [np.broadcast_to(np.int64(7), size) for size in contexts], group=group, kv_heads=kv_heads, rows=rows
        )
        room = Room.of(int(lengths.sum() + generator.integers(3)), group=group, kv_heads=kv_heads, rows=rows)
        packed = room.pack(layout, 9)
        if packed is None:
            limit = FEW_NARROW if lengths.sum() > MOST_NARROW else MOST_NARROW
            assert layout.narrow > room.narrow >= limit or len(layout.merges) > room.merges == MOST_MERGES
            continue
        padded = room.within(packed)
        for ours, theirs in ((padded.items, layout.items), (padded.merges, layout.merges)):
            assert torch.equal(ours[ours.any(1)], theirs)
        assert not padded.items[layout.narrow : room.narrow].any()
        assert torch.equal(padded.kv_indices, layout.kv_indices)
        assert len(packed) == room.numbers + len(layout.kv_indices)


@pytest.mark.parametrize("seed", range(8))
def test_every_query_meets_every_key_it_sees_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    contexts = generator.integers(1, 3000 if seed % 2 else 60, generator.integers(1, 12))
    lengths = [int(generator.integers(1, context + 1)) for context in contexts]
    group, kv_heads, rows = int(generator.integers(1, 9)), int(generator.integers(1, 9)), 32
    lists = [np.arange(context) + 7 for context in contexts]
    layout = lay_out(lengths, lists, group=group, kv_heads=kv_heads, rows=rows)
    kv_indptr = np.concatenate([[0], np.cumsum(contexts)])
    met: dict[int, list[tuple[int, int]]] = {query: [] for query in range(sum(lengths))}
    for first, queries, begin, end, own, _ in layout.items.tolist():
        assert begin < end
        assert queries * group <= rows
        for nth in range(queries):
            met[first + nth].append((begin, min(end, own + nth + 1)))
    query = 0
    for segment, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        for nth in range(length):
            begins, ends = zip(*sorted(met[query]), strict=True)
            seen_end = kv_indptr[segment] + context - length + nth + 1
            assert begins[0] == kv_indptr[segment]
            assert max(ends) == seen_end
            assert all(min(end, seen_end) == min(begin, seen_end) for end, begin in zip(ends[:-1], begins[1:], strict=True))
            query += 1
    assert layout.out_cache_loc.tolist() == [int(slot) for n, slots in zip(lengths, lists, strict=True) for slot in slots[-n:]]


def test_what_the_kernel_cannot_take(device: torch.device) -> None:
    q, keys, values = tensors(MIXED, device)
    layout = layout_of(MIXED, q, keys)
    wrong = {
        "float16": (q, keys.half(), values.half(), layout),
        "heads a multiple of kv_heads": (q, keys.expand(-1, 3, -1), values.expand(-1, 3, -1), layout),
        "24 elements": (q[..., :24].contiguous(), keys[..., :24].contiguous(), values[..., :24].contiguous(), layout),
        "make it contiguous": (q, keys.expand(-1, 2, -1), values.expand(-1, 2, -1), layout),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            paged_attention_triton(*arguments)
