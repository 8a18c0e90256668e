"""Attention through the project's own Triton kernel: any NVIDIA GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.core import Run
from engine.memory.kv import KVCache
from engine.models.decoder import Attend
from kernels.attention_layout import lay_out
from kernels.paged_attention import block_rows, paged_attention_triton


class TritonAttention(AttentionBackend):
    """On a GPU; on a CPU only in Triton's interpreter."""

    def __init__(self, kv: KVCache, heads: int) -> None:
        super().__init__(kv)
        self._kv_heads, head_dim = kv.keys.shape[2:]
        self._group = heads // self._kv_heads
        self._rows = block_rows(head_dim, kv.keys.dtype)

    def plan(self, runs: Sequence[Run]) -> Attend:
        lengths, contexts = [len(run.tokens) for run in runs], [run.context for run in runs]
        host = lay_out(lengths, contexts, group=self._group, kv_heads=self._kv_heads, rows=self._rows)
        layout = host.to(self.kv.keys.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv.write(layer, layout.own, k, v)
            return paged_attention_triton(q, self.kv.keys[layer], self.kv.values[layer], layout)

        return attend
