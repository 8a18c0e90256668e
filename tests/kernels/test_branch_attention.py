"""Attention of one-token branches over a prefix: the kernel against the reference, the reference against paged attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.attention_layout import PROGRAMS, lay_out
from yardstick_llm.kernels.branch_attention import branch_attention, branch_attention_reference, branch_attention_triton, chunks_of
from yardstick_llm.kernels.paged_attention import paged_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PREFIXES = [1, 150, 0, 64, 90]
COUNTS = [3, 1, 5, 0, 4]

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(
    prefixes: list[int],
    counts: list[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    branches: int = 5,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
) -> Arguments:
    generator, pool = np.random.default_rng(0), max([1, *prefixes]) + 200
    kv_indices = np.concatenate([np.empty(0, np.int64), *[generator.permutation(pool)[:prefix] for prefix in prefixes]])
    kv_indptr = np.concatenate([[0], np.cumsum(prefixes, dtype=np.int64)]).astype(np.int64)
    tokens = len(prefixes) * branches
    q = torch.randn(tokens, group * kv_heads, head_dim, device=device).to(dtype)
    k, v = torch.randn(2, tokens, kv_heads, head_dim, device=device).to(dtype)
    keys, values = torch.randn(2, pool, kv_heads, head_dim, device=device).to(dtype)
    lists = (torch.from_numpy(array).to(device) for array in (kv_indptr, kv_indices, np.array(counts, np.int64)))
    pointer_list, slot_list, count_list = lists
    return q, k, v, keys, values, pointer_list, slot_list, count_list


def check(given: Arguments) -> None:
    found, expected = branch_attention_triton(*given), branch_attention_reference(*given)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])


def test_reference_is_a_run_of_one_token_on_the_prefix() -> None:
    """Each branch written to a slot behind its prefix gets the same from paged attention."""
    given = arguments(PREFIXES, COUNTS, torch.device("cpu"))
    q, k, v, keys, values, kv_indptr, kv_indices, _ = given
    found = branch_attention(*given)
    for row, count in enumerate(COUNTS):
        prefix = kv_indices[kv_indptr[row] : kv_indptr[row + 1]].numpy()
        for branch in range(row * 5, row * 5 + count):
            own = np.array([len(keys)])
            layout = lay_out([1], [np.concatenate([prefix, own])], group=2, kv_heads=2, rows=128)
            one = slice(branch, branch + 1)
            expected = paged_attention_reference(q[one], torch.cat([keys, k[one]]), torch.cat([values, v[one]]), layout)
            torch.testing.assert_close(found[one], expected, atol=1e-5, rtol=0)
        assert not found[row * 5 + count : row * 5 + 5].any()


@pytest.mark.parametrize("prefixes", [PREFIXES, [1700, 60, 0, 3, 9]], ids=["short", "split"])
def test_branches_side_by_side(prefixes: list[int], device: torch.device) -> None:
    """Rows with few branches leave no room between them, what follows is not read, and results are those of branches apart."""
    q, k, v, keys, values, kv_indptr, kv_indices, counts = arguments(prefixes, COUNTS, device)
    apart = branch_attention_reference(q, k, v, keys, values, kv_indptr, kv_indices, counts)
    real = (torch.arange(5, device=device) < counts.unsqueeze(1)).flatten()
    total, starts = int(counts.sum()), counts.cumsum(0) - counts
    packed = [torch.full_like(each, torch.nan) for each in (q, k, v)]
    for each, given in zip(packed, (q, k, v), strict=True):
        each[:total] = given[real]
    for found in (
        branch_attention_reference(*packed, keys, values, kv_indptr, kv_indices, counts, starts=starts),
        branch_attention_triton(*packed, keys, values, kv_indptr, kv_indices, counts, starts=starts),
    ):
        torch.testing.assert_close(found[:total], apart[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("group", "branches", "head_dim"), [(1, 5, 32), (3, 1, 64), (2, 16, 32), (6, 5, 128), (8, 16, 32)])
def test_groups_branches_and_heads(group: int, branches: int, head_dim: int, device: torch.device) -> None:
    counts = [min(count, branches) for count in COUNTS]
    check(arguments(PREFIXES, counts, device, group=group, branches=branches, kv_heads=1, head_dim=head_dim))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    check(arguments(PREFIXES, COUNTS, device, dtype, head_dim=64))


@pytest.mark.parametrize("branches", [1, 5])
def test_long_prefixes_are_read_by_several_programs(branches: int, device: torch.device) -> None:
    """Among them one too short for all chunks to have a part, and an empty one."""
    given = arguments([1700, 60, 0], [branches, 1, 1], device, branches=branches)
    assert chunks_of(len(given[6]) // 3, 6) > 1
    check(given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_many_rows(dtype: torch.dtype, device: torch.device) -> None:
    prefixes = np.random.default_rng(0).integers(0, 4000, 300).tolist()
    counts = np.random.default_rng(1).integers(0, 6, 300).tolist()
    check(arguments(prefixes, counts, device, dtype, group=6, head_dim=128))


def test_padding_and_foreign_slots_are_not_read(device: torch.device) -> None:
    """Padding gives zeros whatever it holds."""
    q, k, v, keys, values, kv_indptr, kv_indices, counts = arguments(PREFIXES, COUNTS, device)
    padding = torch.arange(25, device=device) % 5 >= counts.repeat_interleave(5)
    q[padding] = k[padding] = v[padding] = torch.nan
    used = torch.zeros(len(keys) + 1, dtype=torch.bool, device=device)
    used[1 + kv_indices] = True  # one more slot, the first, is nobody's
    keys, values = (torch.cat([cache[:1], cache]).masked_fill(~used[:, None, None], torch.nan) for cache in (keys, values))
    found = branch_attention_triton(q, k, v, keys, values, kv_indptr, kv_indices + 1, counts)
    assert found.isfinite().all()
    assert not found[padding].any()


def test_no_rows(device: torch.device) -> None:
    assert branch_attention_triton(*arguments([], [], device)).shape == (0, 4, 32)


def test_chunks() -> None:
    """One where rows are many or prefixes short; never more programs than are wanted."""
    assert chunks_of(100_000, PROGRAMS) == chunks_of(100_000, 10 * PROGRAMS) == chunks_of(200, 1) == chunks_of(0, 1) == 1
    assert chunks_of(100_000, 16) * 16 == PROGRAMS
    assert 1 < chunks_of(1000, 1) <= 4


def test_what_the_kernel_cannot_take(device: torch.device) -> None:
    q, k, v, keys, values, kv_indptr, kv_indices, counts = arguments(PREFIXES, COUNTS, device)
    wrong = {
        "k has shape": (q, k[1:], v, keys, values, kv_indptr, kv_indices, counts),
        "no whole number": (q[1:], k[1:], v[1:], keys, values, kv_indptr, kv_indices, counts),
        "more than 128": arguments([3], [80], device, branches=80),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            branch_attention_triton(*given)
