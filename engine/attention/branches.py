"""Branches of one token on a GPU, for every backend there: :mod:`kernels.branch_attention` over a step's prefixes.

Where the kernel's block does not hold all branches of a prefix, the prefix is a row for each part of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import MOST_SLOTS
from engine.ints import EMPTY, Ints
from engine.kvcache.kv import KVCache
from engine.models.decoder import PlainAttend
from kernels.attention_layout import Longs, cumulate
from kernels.branch_attention import MAX_ROWS, branch_attention_triton, chunks_of

LONG = 8192
"""Tokens of a prefix that fixed tables are cut for, whatever their prefixes are: chunks beyond a short one's end do little."""


def plan_branches(kv: KVCache, group: int, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
    """See :meth:`AttentionBackend.plan_branches`. group: query heads for each key head."""
    width = branches[0]
    assert all(count == width for count in branches), "a GPU takes the same number of branches for each prefix"
    part, parts = _parts(width, group)
    starts, listed = _listed(prefixes, parts)
    packed = _packed(starts, listed, pinned=kv.keys.is_cuda).to(kv.keys.device, non_blocking=True)
    kv_indptr, kv_indices = packed[: len(starts)], packed[len(starts) :]
    counts = _in_parts(counts, part, parts)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return branch_attention_triton(q, k, v, kv.keys[layer], kv.values[layer], kv_indptr, kv_indices, counts)

    return attend


class FixedBranches:
    """Attention of branches from tables of fixed address and size, so that a CUDA graph can capture it."""

    def __init__(self, kv: KVCache, heads: int, most_rows: int, width: int) -> None:
        """most_rows: largest number of prefixes; width: branches of each; heads: query heads of the model."""
        self.kv = kv
        self.width = width
        self._kv_heads = kv.keys.shape[2]
        self._part, self._parts = _parts(width, heads // self._kv_heads)
        self._tables = torch.zeros(most_rows * self._parts + 1 + MOST_SLOTS, dtype=torch.int64, device=kv.keys.device)

    def fill(self, prefixes: Sequence[Ints], rows: int) -> bool:
        """Queue the copy of the tables of ``prefixes``, padded with empty ones to ``rows``; False, and nothing is done, where they
        do not fit."""
        kv_indptr, listed = _listed(prefixes, self._parts)
        room = rows * self._parts + 1
        if len(kv_indptr) > room or room + len(listed) > len(self._tables):
            return False
        kv_indptr = np.pad(kv_indptr, (0, room - len(kv_indptr)), mode="edge")
        packed = _packed(kv_indptr, listed, pinned=self._tables.is_cuda)
        self._tables[: len(packed)].copy_(packed, non_blocking=True)
        return True

    def positions(self, rows: int) -> Tensor:
        """Positions of all branches of ``rows`` prefixes, as :meth:`fill` last described them, [rows · width] int64."""
        lengths = self._tables[: rows * self._parts + 1].diff()[:: self._parts]
        return lengths.unsqueeze(1).expand(-1, self.width).flatten()

    def attend(self, rows: int, counts: Tensor) -> PlainAttend:
        """Attention for ``rows`` prefixes, as :meth:`fill` last described them. counts: [rows] int64; for padding any number up to
        the width.
        """
        kv, room = self.kv, rows * self._parts + 1
        kv_indptr, kv_indices = self._tables[:room], self._tables[room:]
        counts = _in_parts(counts, self._part, self._parts)
        chunks = chunks_of(LONG, rows * self._parts * self._kv_heads)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return branch_attention_triton(q, k, v, kv.keys[layer], kv.values[layer], kv_indptr, kv_indices, counts, chunks)

        return attend


def _parts(width: int, group: int) -> tuple[int, int]:
    """(branches in a part, parts of a prefix's ``width`` branches)"""
    part = min(width, 1 << (MAX_ROWS // group).bit_length() - 1)
    return part, -(-width // part)


def _in_parts(counts: Tensor, part: int, parts: int) -> Tensor:
    """Number of real branches of each part, [prefixes · parts]."""
    if parts == 1:
        return counts
    first = torch.arange(parts, device=counts.device) * part
    return (counts.unsqueeze(1) - first).clamp(0, part).flatten()


def _listed(prefixes: Sequence[Ints], parts: int) -> tuple[Longs, Ints]:
    """Start of each part's prefix in the list of all slots, and that list."""
    repeated = [prefix for prefix in prefixes for _ in range(parts)]
    return cumulate(np.array([len(prefix) for prefix in repeated], np.int64)), np.concatenate([EMPTY, *repeated])


def _packed(kv_indptr: Longs, listed: Ints, *, pinned: bool) -> Tensor:
    """Both tables as one tensor on the host, ready for a copy to the device without waiting."""
    packed = torch.from_numpy(np.concatenate([kv_indptr, listed]))
    return packed.pin_memory() if pinned else packed
