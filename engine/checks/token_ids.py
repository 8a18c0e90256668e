"""Checks of token ids. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from engine import wire


def all_known(branches: Collection[Sequence[int]], info: wire.Info) -> bool:
    """Whether every token id of ``branches`` is one of the model's: :func:`known` of each, in half of the time."""
    try:
        ids = np.fromiter(itertools.chain.from_iterable(branches), np.int64, sum(map(len, branches)))
    except OverflowError:
        return False
    return not ids.size or bool(ids.min() >= 0 and ids.max() < info.vocab_size)


def known(tokens: Collection[int], info: wire.Info) -> bool:
    """Whether every token id is one of the model's."""
    return not tokens or (min(tokens) >= 0 and max(tokens) < info.vocab_size)
