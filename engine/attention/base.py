"""The seam: what a step's attention is asked to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.core import Run
from engine.memory.kv import KVCache
from engine.models.decoder import Attend


class AttentionBackend(ABC):
    """Attends from new tokens to slots."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    @abstractmethod
    def plan(self, runs: Sequence[Run]) -> Attend:
        """Prepare a step once for all layers.

        The result is called once a layer with the queries, keys and values of the runs' tokens, concatenated in order. It writes
        all keys and values to the runs' slots first, then lets each query attend to its run's context up to its own slot.
        """
