"""Hidden rows to log-probabilities: of a few labels for scoring, of given tokens for prompts. Only the rows asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.sampling import token_logprobs
from kernels.label_logprobs import CHUNK_ELEMENTS
from kernels.label_logprobs import label_logprobs as gather_labels


def label_logprobs(decoder: Decoder, hidden: Tensor, labels: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities over the full vocabulary of each row's labels, in their order.

    hidden: [rows, hidden], as :meth:`Decoder.forward` returns them; labels: one list a row, of any lengths, ids below the
    decoder's ``vocab_size``. -> [row][label], float32.
    """
    width = max((len(row) for row in labels), default=0)
    if width == 0:
        return [[] for _ in labels]
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in labels], device=hidden.device)
    found = gather_labels(hidden, decoder.head_weight, padded).tolist()
    return [values[: len(row)] for values, row in zip(found, labels, strict=True)]


def next_token_logprobs(decoder: Decoder, hidden: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`engine.sampling.token_logprobs` of the token that follows each hidden row, a part of the rows at a time.

    hidden: [rows, hidden]; tokens: [rows]. -> ([rows], [rows, top_n], [rows, top_n]).
    """
    rows = max(1, CHUNK_ELEMENTS // decoder.config.vocab_size)
    parts = [
        token_logprobs(decoder.logits(part), chosen, top_n)
        for part, chosen in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True)
    ]
    chosen, ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ids, top
