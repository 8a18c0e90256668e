"""Log-probabilities of a few labels a row, over the whole vocabulary, without ever holding [rows, vocab] of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear import linear

CHUNK_ELEMENTS = 1 << 24
"""Logits in memory at a time: 64 MiB of float32. Fewer rows a product would read the head's weights more often."""


def label_logprobs(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """``log_softmax(hidden · headᵀ)`` at each row's own labels.

    hidden: [rows, size]; head: [vocab, size]; labels: [rows, labels] int64, below vocab. -> [rows, labels], float32, as is the
    sum over the vocabulary whatever the dtype of the product.
    """
    rows = max(1, CHUNK_ELEMENTS // len(head))
    out = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = linear(hidden[part], head).float()
        out[part] = logits.gather(1, labels[part]) - logits.logsumexp(1, keepdim=True)
    return out
