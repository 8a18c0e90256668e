"""What scoring needs of a cache of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Logprobs = tuple[float, ...]
"""[label]: log-probabilities over the whole vocabulary, in the order of the labels that the key was made with."""


class ResultCache(Protocol):
    """Keys are digests (``gateway/scoring/keys.py``); a value never changes, so there is nothing to invalidate.

    No method raises: a cache that fails has nothing, and takes nothing.
    """

    async def get_many(self, keys: Sequence[bytes]) -> list[Logprobs | None]:
        """The value of each key, None where there is none."""
        ...

    async def put_many(self, results: Mapping[bytes, Logprobs]) -> None:
        """Keep ``results`` for as long as there is room."""
        ...
