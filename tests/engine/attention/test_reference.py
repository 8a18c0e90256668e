"""The reference against attention of one query at a time: groups that are padded or not, cut into tiles or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from yardstick_llm.engine.ints import EMPTY, Ints, as_ints
from yardstick_llm.engine.models.decoder import Heads
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.runner.attention import reference
from yardstick_llm.engine.runner.attention.base import KVCache
from yardstick_llm.engine.runner.attention.native import NativeAttention
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 6, 2, 16, 700


def segment(context: Ints, new: int) -> ExtendSegment:
    return ExtendSegment(Request(id="r", prefix=EMPTY), None, np.zeros(new, np.int32), context)


def step(lengths: list[int]) -> list[ExtendSegment]:
    """A query of 24 tokens, items of these lengths behind it, and a token that is decoded behind 30 others."""
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    query, rest = slots[:24], slots[24:]
    segments = [segment(query, len(query))]
    for length in lengths:
        segments.append(segment(as_ints([query, rest[:length]]), length))
        rest = rest[length:]
    return [*segments, segment(rest[:31], 1)]


def one_at_a_time(q: Tensor, kv: KVCache, segments: list[ExtendSegment]) -> Tensor:
    rows = []
    for each in segments:
        before = len(each.context) - len(each.tokens)
        for place in range(len(each.tokens)):
            slots = torch.from_numpy(each.context[: before + place + 1]).long()
            keys, values = (cache[0, slots].repeat_interleave(HEADS // KV_HEADS, 1) for cache in (kv.keys, kv.values))
            weights = (torch.einsum("hd,shd->hs", q[len(rows)], keys) * HEAD_DIM**-0.5).softmax(1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(rows)


def some_step(lengths: list[int]) -> tuple[KVCache, list[ExtendSegment], Heads]:
    """Full slots, :func:`step`, and the heads of its tokens."""
    torch.manual_seed(0)
    kv = KVCache(layers=1, slots=SLOTS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    kv.keys.normal_()
    kv.values.normal_()
    segments = step(lengths)
    tokens = sum(len(each.tokens) for each in segments)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos, sin = torch.ones(tokens, HEAD_DIM // 2), torch.zeros(tokens, HEAD_DIM // 2)
    return kv, segments, Heads(qkv, KV_HEADS, None, None, 0.0, cos, sin)


@pytest.mark.parametrize("tile", [4, 7, 64])
@pytest.mark.parametrize("lengths", [[20, 20, 20], [20, 17, 19], [9], [40, 3, 40, 1]], ids=str)
def test_every_query_sees_its_context(lengths: list[int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_QUERIES", tile)
    kv, segments, heads = some_step(lengths)
    found = ReferenceAttention(kv, HEADS).plan(segments).attend(0, heads)
    torch.testing.assert_close(found, one_at_a_time(heads.qkv[:, :HEADS], kv, segments), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("before", [0, 200])
def test_only_queries_that_see_what_is_not_finite_are_not_finite(before: int) -> None:
    """``before``: tokens of other sequences in front of it."""
    kv, segments, heads = some_step([before, 40] if before else [40])
    at = sum(len(each.tokens) for each in segments[:-2])  # of the item of 40
    heads.qkv[at + 17] = float("inf")
    heads.qkv[at + 30, HEADS + KV_HEADS :] = float("nan")  # only its values
    found = NativeAttention(kv, HEADS).plan(segments).attend(0, heads)
    assert not found[at + 17 : at + 40].isfinite().any()
    assert found[: at + 17].isfinite().all()
    assert found[at + 40 :].isfinite().all()


def test_items_and_their_queries_are_attended_to_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a catalogue: queries behind cached items, the rest of an item, and items that are computed with their queries."""
    monkeypatch.setattr(reference, "MANY_QUERIES", 40)
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    cached = [segment(slots[begin : begin + 25], 5) for begin in range(0, 200, 25)]
    begun = slots[200:225]
    computed = [(segment(row[:20], 20), segment(row, 5)) for row in slots[225:300].reshape(3, 25)]
    segments = [*cached, segment(begun, 12), *(part for pair in computed for part in pair)]
    assert [count for count, _ in reference.joined(segments)] == [5] * 8 + [12] + [25] * 3
    kv = KVCache(layers=1, slots=SLOTS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    groups = ReferenceAttention(kv, HEADS)._groups(segments, None)
    assert sorted((group.pieces, group.span) for group in groups) == [(1, slice(40, 52)), (3, slice(52, 127)), (8, slice(0, 40))]
