"""Attention of whole sequences, whose tokens all attend to each other; without slots.

Sequences of one length are one call of ``scaled_dot_product_attention``, without padding and without copies: the scheduler puts the
sequences of a step in order of length. With a window, the queries are cut into tiles, each with the keys that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.encoder import Packed
from yardstick_llm.engine.requests.batch import ExtendSegment, runs_of
from yardstick_llm.engine.requests.core import ScoringRequest
from yardstick_llm.engine.runner.attention.reference import attention
from yardstick_llm.kernels.attention_spec import AttentionSpec

TILE = 256
"""Queries of a tile, in layers with a window."""


class WholeAttention:
    """Plans the attention of each step."""

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, *, typed: bool = False) -> None:
        """``specs``: of each layer. ``typed``: whether the model has token types."""
        self._specs = list(specs)
        self._device = device
        self._typed = typed
        self.description = wire.AttentionChoice("reference", "all tokens of a sequence attend to each other")

    def plan(self, segments: Sequence[ExtendSegment]) -> Packed:
        """Prepare a step once for all layers. Each segment is a whole sequence."""
        runs = runs_of([segment.tokens.size for segment in segments])
        specs = self._specs

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(q.shape)
            for start, count, length in runs:
                rows = slice(start, start + count * length)
                of_run, keys, values = (_by_sequence(each[rows], count) for each in (q, k, v))
                _by_sequence(out[rows], count).copy_(attend_whole(of_run, keys, values, specs[layer]))
            return out

        return Packed(attend, self._types(segments))

    def _types(self, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """[tokens] int64: 1 for the second text of a pair; None if there is none."""
        firsts = [segment.request.first_tokens if isinstance(segment.request, ScoringRequest) else 0 for segment in segments]
        if not (self._typed and any(firsts)):
            return None
        lengths = [segment.tokens.size for segment in segments]
        parts = np.array([(first, length - first) for first, length in zip(firsts, lengths, strict=True)]).ravel()
        kinds = np.array([(0, int(first > 0)) for first in firsts]).ravel()
        types = torch.from_numpy(np.repeat(kinds, parts).astype(np.int64))
        return types if self._device.type == "cpu" else types.pin_memory().to(self._device, non_blocking=True)


def _by_sequence(x: Tensor, count: int) -> Tensor:
    """[sequences · length, heads, head_dim] -> a view, [sequences, heads, length, head_dim]"""
    return x.view(count, -1, x.shape[1], x.shape[2]).transpose(1, 2)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q: [sequences, heads, length, head_dim]; k, v: the same with kv_heads. -> like q. Query i sees key j where they are at most
    half of the window apart."""
    reach = None if spec.window is None else spec.window // 2
    length = q.shape[2]
    if reach is None or length <= reach + 1:
        return _attend(q, k, v, None, spec)
    out = torch.empty_like(q)
    for begin in range(0, length, TILE):
        end = min(begin + TILE, length)
        first, last = max(0, begin - reach), min(length, end + reach)
        mask = _band(end - begin, last - first, begin - first, reach, q.dtype, q.device)
        out[:, :, begin:end] = _attend(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], mask, spec)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Query heads that share a key head are folded into the query axis, so that keys and values are never repeated."""
    sequences, heads, length, head_dim = q.shape
    fold = heads // k.shape[1]
    if fold == 1:
        return attention(q, k, v, mask, spec)
    folded = q.reshape(sequences, k.shape[1], fold * length, head_dim)
    return attention(folded, k, v, None if mask is None else mask.repeat(fold, 1), spec).view(q.shape)


@lru_cache(64)
def _band(queries: int, keys: int, shift: int, reach: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, keys], 0 where key j is within ``reach`` of query i, which is at place ``i + shift`` of the keys; else -inf."""
    places = torch.arange(queries, device=device)[:, None] + shift - torch.arange(keys, device=device)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(places.abs() > reach, float("-inf"))
