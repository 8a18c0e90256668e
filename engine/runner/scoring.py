"""Hidden rows to log-probabilities: of a few labels for scoring, of given tokens for prompts. Only the rows asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.sampling import token_logprobs
from engine.models.decoder import Decoder
from kernels.label_logprobs import CHUNK_ELEMENTS
from kernels.label_logprobs import label_logprobs as gather_labels


def label_logprobs(decoder: Decoder, hidden: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities over the full vocabulary of each row's labels. [rows, hidden], [rows, labels] -> [rows, labels] float32."""
    return gather_labels(hidden, decoder.head_weight, labels)


def label_table(labels: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """[rows, most labels of a row]; short rows are filled with token 0."""
    table = np.zeros((len(labels), max(map(len, labels), default=0)), np.int64)
    for row, ids in enumerate(labels):
        table[row, : len(ids)] = ids
    return table


def next_token_logprobs(decoder: Decoder, hidden: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`engine.device.sampling.token_logprobs` of the token that follows each hidden row, a part of the rows at a time.

    hidden: [rows, hidden]; tokens: [rows]. -> ([rows], [rows, top_n], [rows, top_n]).
    """
    rows = max(1, CHUNK_ELEMENTS // decoder.config.vocab_size)
    parts = [
        token_logprobs(decoder.logits(part), chosen, top_n)
        for part, chosen in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True)
    ]
    chosen, ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ids, top
