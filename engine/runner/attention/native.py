"""Attention on a CPU in float32, by loops that are compiled for its processor. They read keys and values from their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from yardstick_llm.engine.ints import as_ints
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import FusedAttend, Heads
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention, joined
from yardstick_llm.kernels import native_attention as native
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write
from yardstick_llm.kernels.runtime import HAS_LOOPS


class NativeAttention(ReferenceAttention):
    """Serves a CPU in float32. Branches of one token attend as in :class:`ReferenceAttention`."""

    make_ready = staticmethod(qk_norm_rope_write)

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:  # noqa: ARG003
        if device.type != "cpu":
            return "it computes on the CPU only"
        if not HAS_LOOPS:
            return "it needs the package numba, which is not installed"
        return None if dtype == kept == torch.float32 else "it computes in float32 only"

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        slots = torch.from_numpy(as_ints(segment.context[-len(segment.tokens) :] for segment in segments).astype(np.int64))
        kv_heads, size = self.kv.keys.shape[2:]
        pieces, start = [], 0
        for count, context in joined(segments):
            pieces.append(native.Piece(start, count, context, len(context) - count))
            start += count
        work = native.plan(pieces, self.heads, kv_heads, size, causal=True)

        def attend(layer: int, heads: Heads) -> torch.Tensor:
            q, spec = self.write(layer, heads, slots), self.specs[layer]
            left = native.UNBOUNDED if spec.window is None else spec.window - 1
            return native.native_attention(q, self.kv.keys[layer], self.kv.values[layer], work, left, 0, spec)

        return FusedAttend(attend)
