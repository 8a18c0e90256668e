"""The seam: what a step's attention is asked to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from engine.core import ExtendSegment
from engine.ints import Ints
from engine.kvcache.kv import KVCache
from engine.models.decoder import FusedAttend, Heads, PlainAttend
from kernels.qk_norm_rope import qk_norm_rope_write

MOST_SLOTS = 1 << 20
"""Slots that the contexts of a step with fixed tables may list together: 8 MiB, a fraction of a millisecond to copy."""


class AttentionBackend(ABC):
    """Attends from new tokens to slots."""

    make_ready = staticmethod(qk_norm_rope_write)
    """What normalises, rotates and writes: one kernel on a GPU, plain PyTorch elsewhere."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    @abstractmethod
    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        """Prepare a step once for all layers.

        The result is called once a layer with the heads of the runs' tokens, concatenated in order. It writes all keys and values
        to the runs' slots first, then lets each query attend to its run's context up to its own slot.
        """

    def write(self, layer: int, heads: Heads, out_cache_loc: Tensor) -> Tensor:
        """Keys, normalised and rotated, and values to the slots ``own``, [tokens] int64; returns the queries, ready to attend."""
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        return self.make_ready(
            heads.qkv, heads.q_weight, heads.k_weight, heads.eps, heads.cos, heads.sin, keys, values, out_cache_loc
        )

    @abstractmethod
    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        """The same for branches of one token, ``branches[i]`` of them on the slots ``prefixes[i]``.

        The result is called with the branches of one prefix after another and writes nothing: each attends to its prefix, filled by
        then, and to itself. counts: [prefixes] int64, on the device: how many of each, the first, are real; what comes back for
        others is not read. Where there are prefixes, there are branches. On a GPU they must be as many for each prefix.
        """
