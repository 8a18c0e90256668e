"""Attention through the project's own Triton kernel: any NVIDIA GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.runner.attention.base import MOST_SLOTS, AttentionBackend, KVCache, plan_branches
from yardstick_llm.kernels.attention_layout import NARROW, Layout, Room, lay_out
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.paged_attention import HEAD_DIMS, block_rows, paged_attention_triton
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write_triton
from yardstick_llm.kernels.runtime import INTERPRETED


class TritonAttention(AttentionBackend):
    """Serves a GPU. On a CPU it runs in Triton's interpreter only."""

    make_ready = staticmethod(qk_norm_rope_write_triton)

    def __init__(self, kv: KVCache, heads: int, specs: Sequence[AttentionSpec] = ()) -> None:
        super().__init__(kv, specs)
        self._kv_heads, head_dim = kv.keys.shape[2:]
        self._group = heads // self._kv_heads
        self._rows = block_rows(head_dim, kv.dtype)

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:  # noqa: ARG003
        if device.type != "cuda" and not INTERPRETED:
            return "it needs an NVIDIA GPU"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or later"
        if config.head_dim not in HEAD_DIMS:
            return f"the model's heads have {config.head_dim} elements, and its kernel takes {', '.join(map(str, HEAD_DIMS))}"
        if config.num_heads > NARROW * config.num_kv_heads:
            return f"the model has more than {NARROW} query heads a key head"
        return None

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        return self._attend(self._lay_out(segments).to(self.kv.keys.device))

    def _lay_out(self, segments: Sequence[ExtendSegment]) -> Layout:
        lengths, contexts = [len(segment.tokens) for segment in segments], [segment.context for segment in segments]
        return lay_out(lengths, contexts, group=self._group, kv_heads=self._kv_heads, rows=self._rows)

    def _attend(self, layout: Layout) -> FusedAttend:
        def attend(layer: int, heads: Heads) -> Tensor:
            q = self.write(layer, heads, layout.out_cache_loc)
            keys, values, spec = self.kv.keys[layer], self.kv.values[layer], self.specs[layer]
            return paged_attention_triton(q, keys, values, layout, self.kv.value_scales(layer), spec)

        return FusedAttend(attend)

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        return plan_branches(self.kv, prefixes, branches, counts)


class FixedTritonAttention(TritonAttention):
    """Attention from tables of fixed address and size, so that a CUDA graph can capture it."""

    layouts = 1

    def __init__(self, kv: KVCache, heads: int, most_tokens: int, specs: Sequence[AttentionSpec] = ()) -> None:
        super().__init__(kv, heads, specs)
        numbers = self._room(most_tokens).numbers + MOST_SLOTS
        self._tables = torch.zeros(numbers, dtype=torch.int64, device=kv.keys.device)

    def attend(self, tokens: int, layout: int = 0) -> FusedAttend:  # noqa: ARG002
        """Attention of a step of ``tokens``, as :meth:`fill` last described it; until then all of them are padding."""
        fits = self.fill((), tokens)
        assert fits is not None, tokens
        return self._attend(self._room(tokens).within(self._tables))

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int | None:
        """Queue the copy of the tables of ``segments``, padded to ``tokens``. None, and no copy, where they do not fit."""
        packed = self._room(tokens).pack(self._lay_out(segments), self.kv.padding_slot)
        if packed is None or len(packed) > len(self._tables):
            return None
        if self._tables.is_cuda:
            packed = packed.pin_memory()
        self._tables[: len(packed)].copy_(packed, non_blocking=True)
        return 0

    def _room(self, tokens: int) -> Room:
        return Room.of(tokens, group=self._group, kv_heads=self._kv_heads, rows=self._rows)
