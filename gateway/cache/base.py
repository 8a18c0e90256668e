"""Interface between scoring and a cache of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Logprobs = tuple[float, ...]
"""[label]: log-probabilities over the whole vocabulary, in the order of the labels in the cache key."""


class ResultCache(Protocol):
    """Keys are digests (``gateway/scoring/keys.py``). A value never changes, so no entry is ever invalidated.

    No method raises: a cache that fails finds nothing and stores nothing.
    """

    async def get_many(self, keys: Sequence[bytes]) -> list[Logprobs | None]:
        """Return the value of each key, None for a missing one."""
        ...

    async def put_many(self, results: Mapping[bytes, Logprobs]) -> None:
        """Store ``results`` as far as there is room."""
        ...
