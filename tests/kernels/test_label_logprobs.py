"""Label log-probabilities: the fused kernels against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.label_logprobs import (
    label_logprobs_reference,
    label_logprobs_triton,
    schedule,
    tiles_for,
)


def _inputs(
    rows: int, vocab: int, size: int, labels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head = torch.randn(rows, size, device=device).to(dtype), torch.randn(vocab, size, device=device).to(dtype)
    return hidden, head, torch.randint(0, vocab, (rows, labels), device=device)


def _expected(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return (hidden.double() @ head.double().T).log_softmax(-1).gather(1, labels).float()


@pytest.mark.parametrize(
    ("rows", "vocab", "size", "labels"), [(1, 50, 16, 1), (3, 700, 96, 2), (70, 300, 130, 3), (0, 40, 16, 2), (2, 40, 1100, 0)]
)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        # tl.dot of bfloat16 is broken in the interpreter.
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_kernel(rows: int, vocab: int, size: int, labels: int, dtype: torch.dtype, device: torch.device) -> None:
    """Logits are sums in float32 in every dtype, so that all are as exact as the products of what they are given."""
    given = _inputs(rows, vocab, size, labels, dtype, device)
    torch.testing.assert_close(label_logprobs_triton(*given), _expected(*given), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_soft_caps(cap: float, device: torch.device) -> None:
    hidden, head, labels = _inputs(7, 700, 96, 3, torch.float32, device)
    logits = hidden.double() @ head.double().T
    expected = (cap * (logits / cap).tanh()).log_softmax(-1).gather(1, labels).float()
    torch.testing.assert_close(label_logprobs_triton(hidden, head, labels, cap), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(label_logprobs_reference(hidden, head, labels, cap), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_at_full_size(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    hidden, head, labels = _inputs(rows, 151936, 1024, 2, dtype, device)
    given = hidden / 32, head, labels
    torch.testing.assert_close(label_logprobs_triton(*given), _expected(*given), atol=1e-4, rtol=1e-5)


def test_never_above_zero(device: torch.device) -> None:
    hidden, _, labels = _inputs(64, 20, 64, 1, torch.float32, device)
    head = torch.zeros(20, 64, device=device)
    head[:10] = hidden[:10] * 3
    labels[:10, 0] = torch.arange(10, device=device)
    found = label_logprobs_triton(hidden, head, labels)
    assert (found <= 0).all()
    assert (found[:10] > -1e-3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_schedule_covers_the_vocabulary_and_wastes_little(dtype: torch.dtype) -> None:
    for rows, vocab in product([1, 16, 17, 65, 1000, 2500, 100_000], [1, 300, 50_000, 151_936]):
        tiles = tiles_for(rows, dtype)
        row_blocks, splits, each = schedule(rows, vocab, tiles, processors=132)
        assert row_blocks * tiles.rows >= rows > (row_blocks - 1) * tiles.rows
        assert splits * each * tiles.vocab >= vocab > (splits - 1) * each * tiles.vocab
        assert splits == 1 or row_blocks * splits <= 4 * 132
