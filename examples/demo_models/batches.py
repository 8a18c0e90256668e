"""Converts documents to padded tensors, with a weight for each learned token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo_models.corpus.documents import (
    Document,
    Kind,
    auxiliary_document,
    check_document,
    description_document,
    relevance_document,
)

QUESTIONS, CHECKS, AUXILIARY, DESCRIPTIONS = 48, 16, 24, 32
"""Documents of each kind in a step."""

WEIGHTS: dict[Kind, float] = {
    "label": 1.0 / QUESTIONS,
    "reason": 0.5 / (4 * QUESTIONS),
    "verdict": 1.0 / (3 * CHECKS),
    "auxiliary": 0.5 / (3 * AUXILIARY),
    "name": 0.5 / (2 * DESCRIPTIONS),
    "text": 1.0 / (50 * DESCRIPTIONS),
}
"""Weight of one token: its kind's share of the loss divided by the usual number of such tokens in a step. It is a constant,
because a mean over batches of texts of similar length would give short texts more weight and teach the model to stop early."""

POOL = 32
"""Number of steps whose descriptions are sorted by length together, which reduces padding."""


@dataclass(frozen=True)
class Batch:
    """Input tokens, targets and their weights."""

    tokens: Tensor
    """[rows, time] int64"""
    targets: Tensor
    """[rows, time]: the token that follows"""
    weights: Tensor
    """[rows, time]: weight of the target in the loss; 0 for tokens that are not learned"""


def training_batches(tokenizer: Tokenizer, seed: int, steps: int) -> Iterator[tuple[Batch, Batch]]:
    """Yield for each step a batch of short documents and one of descriptions.

    Questions become harder over the first 40 % of the steps: the share of hard negatives rises from 0 to 0.75, and the share of
    words that match exactly falls from 0.8 to 0 (except by chance).
    """
    rng = Random(seed)
    descriptions: list[list[Document]] = []
    for step in range(steps):
        if not descriptions:
            descriptions = _draw_descriptions(rng)
        ease = max(0.0, 1 - step / (0.4 * steps))
        hard, exact = 0.75 * (1 - ease), 0.8 * ease
        short = [relevance_document(rng, hard=hard, exact=exact) for _ in range(QUESTIONS)]
        short += [check_document(rng, hard=hard, exact=exact) for _ in range(CHECKS)]
        short += [auxiliary_document(rng) for _ in range(AUXILIARY)]
        yield collate(short, tokenizer), collate(descriptions.pop(), tokenizer)


def _draw_descriptions(rng: Random) -> list[list[Document]]:
    """Draw descriptions for :data:`POOL` steps; each step's have similar lengths, and the steps are in random order."""
    pool = [description_document(rng) for _ in range(POOL * DESCRIPTIONS)]
    pool.sort(key=lambda pieces: sum(len(piece.text) for piece in pieces))
    groups = [pool[start : start + DESCRIPTIONS] for start in range(0, len(pool), DESCRIPTIONS)]
    rng.shuffle(groups)
    return groups


def collate(documents: list[Document], tokenizer: Tokenizer) -> Batch:
    """Pad documents to the length of the longest; each piece is tokenised separately."""
    pieces = [piece for document in documents for piece in document]
    encoded = iter(tokenizer.encode_batch_fast([piece.text for piece in pieces]))
    rows: list[tuple[list[int], list[float]]] = []
    for document in documents:
        tokens: list[int] = []
        weights: list[float] = []
        for piece in document:
            ids = next(encoded).ids
            tokens += ids
            weights += [WEIGHTS[piece.kind] if piece.kind else 0.0] * len(ids)
        rows.append((tokens, weights))
    time = max(len(tokens) for tokens, _ in rows)
    tokens_padded = torch.tensor([tokens + [0] * (time - len(tokens)) for tokens, _ in rows])
    weights_padded = torch.tensor([weights + [0.0] * (time - len(weights)) for _, weights in rows])
    return Batch(tokens_padded[:, :-1], tokens_padded[:, 1:], weights_padded[:, 1:])
