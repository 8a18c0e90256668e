"""Attention of whole sequences: plain PyTorch against the formula, and the kernel against that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels import native
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.whole_attention import (
    ROWS,
    Layout,
    cut,
    runs_of,
    whole_attention,
    whole_attention_native,
    whole_attention_reference,
    whole_attention_triton,
)

SPECS = {
    "all": PLAIN,
    "window": AttentionSpec(None, 20),
    "odd window and scale": AttentionSpec(0.3, 7),
    "cap": AttentionSpec(None, 40, 3.0),
}


def heads(lengths: list[int], count: int, kv: int, head_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v as parts of one projection."""
    fused = torch.randn(sum(lengths), count + 2 * kv, head_dim).to(dtype)
    return list(torch.split(fused, [count, kv, kv], 1))


def test_tokens_that_no_token_attends_to() -> None:
    """They attend to the others, as padding in transformers does."""
    lengths = [9, 9, 40]
    q, k, v = heads(lengths, 2, 2, 16)
    layout = Layout(runs_of(lengths, [0, 4, 4]), torch.empty(0, 4, dtype=torch.int32))
    found = whole_attention(q, k, v, layout, PLAIN)
    torch.testing.assert_close(found[:9].double(), formula(q[:9], k[:9], v[:9], [9], PLAIN), atol=1e-5, rtol=1e-5)
    scores = torch.einsum("qhd,khd->hqk", q[18:], k[18:54]) / 4
    torch.testing.assert_close(found[18:], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[18:54]), atol=1e-5, rtol=1e-5)


def formula(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], spec: AttentionSpec) -> Tensor:
    """In float64, one sequence at a time."""
    out, start, fold = torch.empty(q.shape, dtype=torch.float64), 0, q.shape[1] // k.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        queries, keys, values = q[rows].double(), *(each[rows].double().repeat_interleave(fold, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * spec.scale_of(q.shape[2])
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap if spec.soft_cap else scores
        apart = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        hidden = apart > (length if spec.window is None else spec.window // 2)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
        start += length
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", [(4, 4, 32), (4, 2, 24)])
@pytest.mark.parametrize(
    ("attend", "tolerance"),
    [(whole_attention_reference, 1e-5), (whole_attention_native, 1e-5), (partial(whole_attention_native, narrow=True), 2e-2)],
    ids=["reference", "native", "narrow"],
)
def test_it_is_the_formula(
    attend: Callable[..., Tensor], tolerance: float, spec: AttentionSpec, shape: tuple[int, int, int]
) -> None:
    lengths = [1, 3, 3, 3, 50, 601]
    q, k, v = heads(lengths, *shape)
    found = attend(q, k, v, Layout(runs_of(lengths), torch.empty(0, 4, dtype=torch.int32)), spec)
    torch.testing.assert_close(found.double(), formula(q, k, v, lengths, spec), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_do_not_depend_on_the_part_that_they_are_in(narrow: bool) -> None:
    """Bit for bit in bfloat16; in float32, where few rows read keys in place, to the last digits."""
    lengths = [40, 3, 57]
    q, k, v = heads(lengths, 4, 4, 32)
    layout, found = Layout(runs_of(lengths), torch.empty(0, 4, dtype=torch.int32)), torch.empty(q.shape)
    for part in (slice(0, 38), slice(38, 99), slice(99, 100)):
        found[part] = whole_attention_native(q[part], k, v, layout, SPECS["window"], part, narrow=narrow)
    whole = whole_attention_native(q, k, v, layout, SPECS["window"], narrow=narrow)
    tolerance = 0 if narrow and native.HAS_PAIRS else 1e-6
    torch.testing.assert_close(found, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not native.HAS_PAIRS, reason="the processor does not multiply bfloat16")
def test_hidden_values_that_are_no_numbers_are_not_read_in_bfloat16() -> None:
    q, k, v = heads([70], 2, 2, 32)
    v[60:] = float("nan")
    layout = Layout(runs_of([70], [10]), torch.empty(0, 4, dtype=torch.int32))
    found = whole_attention_native(q, k, v, layout, AttentionSpec(None, 30), narrow=True)
    assert torch.equal(found[:40].isnan(), torch.zeros(40, 2, 32, dtype=torch.bool))
    k[50] = float("inf")
    assert whole_attention_native(q, k, v, layout, PLAIN, narrow=True).isnan().all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("shape", "dtype"), [((3, 3, 32), torch.float32), ((4, 2, 24), torch.float16)])
def test_the_kernel(spec: AttentionSpec, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    lengths = [1, 5, 5, ROWS, ROWS + 1, 150]
    q, k, v = heads(lengths, *shape, dtype)
    runs = runs_of(lengths, [0, 2, 2, 3, 0, 3])
    layout = Layout(runs, cut(runs).to(device))
    found = whole_attention_triton(*(each.to(device) for each in (q, k, v)), layout, spec)
    expected = whole_attention_reference(q, k, v, layout, spec)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_blocks_cover_each_query_once_and_the_longest_sequences_come_first() -> None:
    lengths = [2, ROWS, 200, 1]
    blocks = cut(runs_of(lengths)).tolist()
    assert blocks[:4] == [[2 + ROWS, 200, 200, first] for first in range(0, 200, ROWS)]
    assert sorted(start for start, _, _, first in blocks if first == 0) == [0, 2, 2 + ROWS, 202 + ROWS]


@pytest.mark.parametrize("sequences", [1, 3, 40])
@pytest.mark.parametrize("unseen", [0, 5])
def test_short_sequences_share_threads_by_sequence_or_by_head(sequences: int, unseen: int) -> None:
    lengths = [130] * sequences
    q, k, v = heads(lengths, 6, 3, 16, torch.bfloat16)
    runs = runs_of(lengths, [unseen] * sequences)
    found = whole_attention(q, k, v, Layout(runs, torch.empty(0, 4, dtype=torch.int32)), PLAIN)
    for start in range(0, len(q), lengths[0]):
        rows, keys = slice(start, start + lengths[0]), slice(start, start + lengths[0] - unseen)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[keys].double().repeat_interleave(2, 1)) / 4
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys].double().repeat_interleave(2, 1))
        torch.testing.assert_close(found[rows].double(), expected, atol=1e-2, rtol=1e-2)
