"""Exclusion of tokens by bits: the kernel against the reference, and the reference against sets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import yardstick_llm.kernels.token_bits
from yardstick_llm.kernels.token_bits import exclude_reference_, exclude_triton_

Operation = Callable[[Tensor, Tensor, Tensor], None]
BOTH = pytest.mark.parametrize("operation", [exclude_reference_, exclude_triton_])


@BOTH
@pytest.mark.parametrize(("vocab", "words_beyond"), [(1, 0), (31, 3), (32, 0), (33, -1), (1000, 0), (1000, -1)])
def test_only_tokens_with_a_bit_are_left(
    operation: Operation, vocab: int, words_beyond: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yardstick_llm.kernels.token_bits, "BLOCK", 64)  # several programs for a row, the last one not full
    words = max(1, -(-vocab // 32) + words_beyond)
    logits = torch.randn(5, vocab, device=device)
    before = logits.clone()
    rows = torch.tensor([3, 0], device=device)
    bits = torch.randint(-(2**31), 2**31, (2, words), device=device).int()
    operation(logits, rows, bits)
    assert torch.equal(logits[[1, 2, 4]], before[[1, 2, 4]])
    for row, line in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(vocab):
            allowed = token // 32 < words and line[token // 32] >> token % 32 & 1
            assert logits[row, token] == (before[row, token] if allowed else -math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 256])
def test_full_size(count: int, device: torch.device) -> None:
    logits = torch.randn(2 * count, 151936, device=device)
    expected, rows = logits.clone(), torch.randperm(2 * count, device=device)[:count]
    bits = torch.randint(-(2**31), 2**31, (count, 4748), device=device).int()
    exclude_triton_(logits, rows, bits)
    exclude_reference_(expected, rows, bits)
    assert torch.equal(logits, expected)
