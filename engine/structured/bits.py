"""Sets of tokens as bits: token id i is bit i % 32 of word i // 32."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]
"""[words]: an even number of words, so that rows of bits can be copied as int64."""


def words_of(vocab_size: int) -> int:
    """Number of words of the bits of a vocabulary."""
    return 2 * -(-vocab_size // 64)


def bits_of(tokens: Iterable[int], words: int) -> Bits:
    """The set of ``tokens``, which are below ``32 · words``."""
    ids = np.fromiter(tokens, np.int64)
    bits = np.zeros(words, np.uint32)
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits
