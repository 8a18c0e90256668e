"""Branches of one token on a GPU, for every backend there: :mod:`kernels.branch_attention` over a step's prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import MOST_SLOTS
from engine.ints import Ints
from engine.kvcache.kv import KVCache
from engine.models.decoder import PlainAttend
from kernels.attention_layout import Longs, cumulate
from kernels.branch_attention import branch_attention_triton, chunks_of

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
