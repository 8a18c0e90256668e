"""Requests of random tokens. This module imports no torch, because the load's process imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import wire

LABELS_BELOW = 256
"""Upper bound of label ids. Every tokeniser has these tokens as text; the last rows of a head are often padding."""


@dataclass(frozen=True)
class Workload:
    """One request's lengths, in tokens."""

    query: int = 120
    item: int = 180
    items: int = 10
    labels: int = 2

    def __str__(self) -> str:
        return f"{self.query}/{self.item}/{self.items}"

    @property
    def tokens(self) -> int:
        """Number of tokens that must be computed: the query once and every item once."""
        return self.query + self.items * self.item

    def request(self, name: str, rng: np.random.Generator, vocab_size: int) -> wire.Score:
        """Return one request of random token ids; no two requests share text."""

        def tokens(*shape: int) -> Any:
            return rng.integers(0, vocab_size, shape).tolist()

        labels = rng.choice(LABELS_BELOW, self.labels, replace=False).tolist()
        return wire.Score(name, tokens(self.query), tokens(self.items, self.item), wire.Labels(labels))
