"""Keys and values of all slots, the interface of attention backends, and branches of one token on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.models.transfer import zeros
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.kernels.attention_layout import Longs, cumulate
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.branch_attention import branch_attention_triton, chunks_of
from yardstick_llm.kernels.lora_rope import lora_rope_write
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write
from yardstick_llm.kernels.quantize import FP8


class KVCache:
    """Keys and values of every slot in every layer, [layers, slots + 1, kv_heads, head_dim] each, allocated once.

    The last slot is never allocated: padding is written there, and nothing reads it.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Tensor | None = None,
    ) -> None:
        """``dtype``: the model's. ``scales``: [layers, 2, kv_heads] float32, see
        :func:`engine.models.formats.quantization.kv_scales`. With them, keys and values are FP8 codes (:mod:`kernels.kv_codes`)."""
        self.slots = slots
        self.dtype = dtype
        self.scales = scales
        shape = (layers, slots + 1, kv_heads, head_dim)
        # Zeros: a masked read of a slot that was never written must not return NaN.
        kept = dtype if scales is None else FP8
        self.keys, self.values = (zeros(shape, kept, torch.device(device)) for _ in range(2))

    def value_scales(self, layer: int) -> Tensor | None:
        """[kv_heads] float32; None where values are not codes."""
        return None if self.scales is None else self.scales[layer, 1]

    @property
    def padding_slot(self) -> int:
        """Slot that padding is written to."""
        return self.slots


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
        """Set by :func:`engine.runner.attention.select.make_attention`."""

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
        scales = None if self.kv.scales is None else self.kv.scales[layer]
        if heads.write is not None:
            return heads.write(keys, values, out_cache_loc, scales)
        given = heads.q_weight, heads.k_weight, heads.eps, heads.cos, heads.sin, keys, values, out_cache_loc
        if heads.delta is None:
            return self.make_ready(heads.qkv, *given, scales)
        assert scales is None, "adapters exclude keys and values in FP8"
        return lora_rope_write(heads.qkv, heads.delta, *given)

    @abstractmethod
    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        """Prepare attention of one-token branches: ``branches[i]`` of them on the prefix in the slots ``prefixes[i]``.

        The result is called with the branches of one prefix after another, and writes nothing. Each branch attends to its prefix,
        which is filled by then, and to itself. counts: [prefixes] int64, on the device: number of real branches of each prefix,
        which come first; outputs of the others are not read. If there are prefixes, there are branches. On a GPU each prefix must
        have the same number, at most :data:`kernels.branch_attention.MAX_ROWS` over the query heads of a key head.
        """


LONG = 8192
"""Tokens of a prefix that fixed tables are cut for, whatever their prefixes are: chunks beyond a short one's end do little."""


def plan_branches(kv: KVCache, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
    """See :meth:`AttentionBackend.plan_branches`."""
    width = branches[0]
    assert all(count == width for count in branches), "a GPU takes the same number of branches for each prefix"
    rows = len(prefixes) + 1
    packed = _packed(_kv_indptr(prefixes), prefixes, pinned=kv.keys.is_cuda).to(kv.keys.device, non_blocking=True)
    kv_indptr, kv_indices = packed[:rows], packed[rows:]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return branch_attention_triton(q, k, v, kv.keys[layer], kv.values[layer], kv_indptr, kv_indices, counts)

    return attend


class FixedBranches:
    """Attention of branches from tables of fixed address and size, so that a CUDA graph can capture it."""

    def __init__(self, kv: KVCache, most_rows: int, width: int) -> None:
        """most_rows: largest number of prefixes; width: branches of each."""
        self.kv = kv
        self.most_rows = most_rows
        self.width = width
        self._kv_heads = kv.keys.shape[2]
        self._tables = torch.zeros(most_rows + 1 + MOST_SLOTS, dtype=torch.int64, device=kv.keys.device)

    def fits(self, prefixes: Sequence[Ints], rows: int) -> bool:
        """Whether the tables have room for ``prefixes`` and padding up to ``rows``."""
        return len(prefixes) <= rows and rows + 1 + sum(prefix.size for prefix in prefixes) <= len(self._tables)

    def fill(self, prefixes: Sequence[Ints], rows: int) -> bool:
        """Queue the copy of the tables of ``prefixes``, padded with empty ones to ``rows``; False, and nothing is done, where they
        do not fit."""
        if not self.fits(prefixes, rows):
            return False
        room, kv_indptr = rows + 1, _kv_indptr(prefixes)
        padding = np.full(room - len(kv_indptr), kv_indptr[-1])
        packed = _packed(np.concatenate([kv_indptr, padding]), prefixes, pinned=self._tables.is_cuda)
        self._tables[: len(packed)].copy_(packed, non_blocking=True)
        return True

    def positions(self, rows: int) -> Tensor:
        """Positions of all branches of ``rows`` prefixes, as :meth:`fill` last described them, [rows · width] int64."""
        lengths = self._tables[: rows + 1].diff()
        return lengths.unsqueeze(1).expand(-1, self.width).flatten()

    def attend(self, rows: int, counts: Tensor, starts: Tensor | None = None) -> PlainAttend:
        """Attention for ``rows`` prefixes, as :meth:`fill` last described them.

        counts: [rows] int64; for padding any number up to the width. starts: [rows] int64, place of each prefix's first branch,
        where they are not ``width`` apart; then padding has a count of 0.
        """
        kv, room = self.kv, rows + 1
        kv_indptr, kv_indices = self._tables[:room], self._tables[room:]
        chunks = chunks_of(LONG, rows * self._kv_heads)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = kv.keys[layer], kv.values[layer]
            return branch_attention_triton(q, k, v, keys, values, kv_indptr, kv_indices, counts, chunks, starts)

        return attend


def _kv_indptr(prefixes: Sequence[Ints]) -> Longs:
    """Start of each prefix in the list of all slots, and the length of that list."""
    return cumulate(np.array([prefix.size for prefix in prefixes], np.int64))


def _packed(kv_indptr: Longs, prefixes: Sequence[Ints], *, pinned: bool) -> Tensor:
    """``kv_indptr`` and the slots of all prefixes as one tensor on the host, ready for a copy to the device without waiting."""
    packed = torch.from_numpy(np.concatenate([kv_indptr, *prefixes], dtype=np.int64))
    return packed.pin_memory() if pinned else packed
