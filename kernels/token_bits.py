"""Excludes tokens from some rows of logits by bits, one for each token of the vocabulary, as grammars compute them.

Only the rows that have bits are read or written. A row of 152,000 logits takes 608 kB, its bits 19 kB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, tl

BLOCK = 4096
"""Tokens of a row that a program takes."""

_LIMITS_OF_BYTE = torch.where(torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1 == 0, float("-inf"), float("inf"))
"""[256, 8] float32: for each byte of eight bits, the largest logits that they allow."""


def exclude_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set ``logits[rows[i], token]`` to -inf, in place, where bit ``token % 32`` of ``bits[i, token // 32]`` is 0.

    logits: [rows of the batch, vocab] float32; rows: [rows] int64, none twice; bits: [rows, words] int32. Tokens beyond the bits
    are excluded, and bits beyond the vocabulary ignored.
    """
    operation = exclude_triton_ if launches(logits) else exclude_reference_
    operation(logits, rows, bits)


def exclude_reference_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """:func:`exclude_` in plain PyTorch, for a CPU: a minimum with limits that a table gives for each byte of the bits. It takes a
    tenth of the time of ``masked_fill``."""
    known = min(logits.shape[-1], 32 * bits.shape[-1])
    table = _LIMITS_OF_BYTE.to(bits.device)
    for row, words in zip(rows.tolist(), bits, strict=True):
        limits = table.index_select(0, words.view(torch.uint8).int()).flatten()[:known]
        torch.minimum(logits[row, :known], limits, out=logits[row, :known])
        logits[row, known:] = float("-inf")


def exclude_triton_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """:func:`exclude_` on a GPU. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("logits", logits)
    batch, vocab = logits.shape
    count, words = len(rows), bits.shape[-1]
    expect("logits", logits, logits, (batch, vocab), (torch.float32,))
    expect("rows", rows, logits, (count,), (torch.int64,))
    expect("bits", bits, logits, (count, words), (torch.int32,))
    _exclude[(count, -(-vocab // BLOCK))](logits, rows, bits, vocab, words, BLOCK, num_warps=8)


@jit("rows", "bits", "words_a_row")
def _exclude(
    logits: tl.tensor, rows: tl.tensor, bits: tl.tensor, VOCAB: tl.constexpr, words_a_row: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """BLOCK tokens of a row a program. Logits are written only, and only where a token is excluded."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits + place * words_a_row + (ids >> 5), mask=(ids >> 5) < words_a_row, other=0)
    excluded = ((words >> (ids & 31)) & 1) == 0
    tl.store(logits + row * VOCAB + ids, float("-inf"), mask=excluded & (ids < VOCAB))
