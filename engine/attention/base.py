"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from engine import wire
from engine.batch import ExtendSegment
from engine.ints import Ints
from engine.kvcache.kv import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import FusedAttend, Heads, PlainAttend
from kernels.attention_spec import PLAIN, AttentionSpec
from kernels.lora_rope import lora_rope_write
from kernels.qk_norm_rope import qk_norm_rope_write

MOST_SLOTS = 1 << 20
"""Slots that the contexts of a step with fixed tables may list together: 8 MiB, a fraction of a millisecond to copy."""


class AttentionBackend(ABC):
    """Attends from new tokens to slots."""

    make_ready = staticmethod(qk_norm_rope_write)
    """Normalises and rotates queries and keys, and writes keys and values: one kernel on a GPU, plain PyTorch elsewhere."""

    def __init__(self, kv: KVCache, specs: Sequence[AttentionSpec] = ()) -> None:
        """``specs``: of each layer; empty if all layers attend to all tokens, with the usual scale."""
        self.kv = kv
        self.specs = list(specs) or [PLAIN] * len(kv.keys)
        self.description: wire.AttentionChoice | None = None
        """Set by :func:`engine.attention.select.make_attention`."""

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:  # noqa: ARG003
        """Return why the backend cannot serve a model on ``device``, as a clause; None if it can.

        ``kept``: dtype of keys and values.
        """
        return None

    @abstractmethod
    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        """Prepare a step once for all layers.

        The result is called once for each layer with the heads of the segments' tokens, concatenated in order. It first writes all
        keys and values to the segments' slots, then lets each query attend to its segment's context up to its own slot, as the
        layer's spec says.
        """

    def write(self, layer: int, heads: Heads, out_cache_loc: Tensor) -> Tensor:
        """Write keys, normalised and rotated, and values to the slots ``out_cache_loc``, [tokens] int64. Returns the queries,
        ready to attend; where keys and values are kept in FP8, they are multiplied by the scales of the keys.
        """
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        if heads.delta is not None:
            assert self.kv.scales is None, "adapters exclude keys and values in FP8"
            given = heads.q_weight, heads.k_weight, heads.eps, heads.cos, heads.sin
            return lora_rope_write(heads.qkv, heads.delta, *given, keys, values, out_cache_loc)
        scales = None if self.kv.scales is None else self.kv.scales[layer]
        return self.make_ready(
            heads.qkv, heads.q_weight, heads.k_weight, heads.eps, heads.cos, heads.sin, keys, values, out_cache_loc, scales
        )

    @abstractmethod
    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        """Prepare attention of one-token branches: ``branches[i]`` of them on the prefix in the slots ``prefixes[i]``.

        The result is called with the branches of one prefix after another, and writes nothing. Each branch attends to its prefix,
        which is filled by then, and to itself. counts: [prefixes] int64, on the device: number of real branches of each prefix,
        which come first; outputs of the others are not read. If there are prefixes, there are branches. On a GPU each prefix must
        have the same number, at most :data:`kernels.branch_attention.MAX_ROWS` over the query heads of a key head.
        """
