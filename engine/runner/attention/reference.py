"""Attention in plain PyTorch: the reference for other backends, and the backend of a CPU.

Segments are cut into pieces of at most :data:`MAX_QUERIES` queries, each with the context that its last query sees. Pieces
of similar shape are padded into one group, whose keys and values are gathered for a few pieces at a time, as many as fit the cores'
caches. ``scaled_dot_product_attention`` is called for a tile of at most :data:`TILE_QUERIES` queries of each piece with the
keys that the tile sees, so that little above the causal diagonal is computed. The query heads that share a key head are folded into
the query axis, so that keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine.ints import EMPTY, Ints, as_ints
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.kernels import kv_codes
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write_reference
from yardstick_llm.kernels.whole_attention import attend

Longs = npt.NDArray[np.int64]

MAX_QUERIES = 256
TILE_QUERIES = 64
"""For items of 180 tokens behind a query of 120, tiles save an eighth of attention's time."""
MAX_WASTE = 1.25
"""A group's padded area may be this many times what its pieces need."""
MANY_QUERIES = 512
"""Pieces of one shape with as many queries in all are not padded for others. Their queries are often consecutive, and then they are
not copied."""
MAX_AREA = 1 << 22
"""Queries × keys of a group, for bounded memory."""
GATHERED_BYTES = 2 << 20
"""Keys and values of a group that are gathered at a time, for each thread, which reads its share of them. More would leave the
cache of a core before they are read; less would cut a group into more calls, and threads wait for each other in each of them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``queries`` consecutive tokens of the step, and the slots that the last of them sees."""

    start: int
    queries: int
    context: Ints


class Tile(NamedTuple):
    """Queries ``begin`` to ``end`` of each piece of a group, and the number of slots that they see at most."""

    begin: int
    end: int
    width: int


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces computed together, as tensors."""

    queries: Tensor
    """[pieces · longest] token index; padding repeats a piece's first token."""
    span: slice | None
    """``queries`` as a slice; None where they are no consecutive tokens."""
    real: Tensor | None
    """Places in ``queries`` that are no padding; None where all are real."""
    rows: Tensor
    """Token index of each real place."""
    slots: Tensor
    """[pieces · longest context]"""
    mask: Tensor
    """[pieces or 1, 1, longest · fold, longest context], 0 or -inf"""
    tiles: list[Tile]
    pieces: int


class ReferenceAttention(AttentionBackend):
    """Serves a CPU. On a GPU it is the reference that other backends are compared with."""

    make_ready = staticmethod(qk_norm_rope_write_reference)

    def __init__(self, kv: KVCache, heads: int, specs: Sequence[AttentionSpec] = ()) -> None:
        super().__init__(kv, specs)
        self.heads = heads
        self._fold = heads // kv.keys.shape[2]

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:  # noqa: ARG003
        return None if device.type == "cpu" else "it computes on the CPU only"

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        slots = self._there(as_ints(segment.context[-len(segment.tokens) :] for segment in segments).astype(np.int64))
        groups = {window: self._groups(segments, window) for window in {spec.window for spec in self.specs}}

        def attend_layer(layer: int, heads: Heads) -> Tensor:
            q = self.write(layer, heads, slots)
            out = q.new_empty(q.shape)
            for group in groups[self.specs[layer].window]:
                self._attend(layer, q, group, out)
            return out

        return FusedAttend(attend_layer)

    def _groups(self, segments: Sequence[ExtendSegment], window: int | None) -> list[Group]:
        return [self._group(pieces, window) for pieces in gather_similar(cut(segments, window))]

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:  # noqa: ARG002
        starts = np.cumsum([0, *branches])
        rows = zip(starts.tolist(), branches, prefixes, strict=False)
        pieces = (Piece(start, count, prefix) for start, count, prefix in rows)
        groups = [self._group(similar, own=True) for similar in gather_similar(pieces)]

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            for group in groups:
                self._attend(layer, q, group, out, (k, v))
            return out

        return attend_layer

    def _attend(self, layer: int, q: Tensor, group: Group, out: Tensor, own: tuple[Tensor, Tensor] | None = None) -> None:
        """Fill the rows of ``out`` [tokens, heads, head_dim] that belong to ``group``; ``own``: keys and values of branches."""
        rows = q.index_select(0, group.queries) if group.span is None else q[group.span]
        result = torch.empty_like(rows) if group.span is None else out[group.span]
        kv_heads, head_dim = self.kv.keys.shape[2:]
        apart = (group.pieces, -1, kv_heads, self._fold, head_dim)  # [pieces, longest, kv_heads, fold, head_dim]
        asked, answered = rows.view(apart), result.view(apart)
        piece_bytes = 2 * len(group.slots) // group.pieces * kv_heads * head_dim * q.element_size()
        gathered = GATHERED_BYTES * torch.get_num_threads()
        spoilt = len(rows) > group.pieces and is_spoilt(rows)
        for some in spans(group.pieces, max(1, gathered // piece_bytes)):
            self._attend_pieces(layer, asked[some], group, some, answered[some], own, spoilt=spoilt)
        if (value_scales := self.kv.value_scales(layer)) is not None:
            answered.mul_(value_scales[:, None, None].to(result.dtype))
        if group.span is None:
            out.index_copy_(0, group.rows, result if group.real is None else result.index_select(0, group.real))

    def _attend_pieces(
        self, layer: int, q: Tensor, group: Group, some: slice, out: Tensor, own: tuple[Tensor, Tensor] | None, *, spoilt: bool
    ) -> None:
        """Attend from ``some`` pieces of a group. q, out: [pieces, longest, kv_heads, fold, head_dim] of these. ``spoilt``: some
        tokens of the step are no numbers. Only the queries that see them have no numbers then: a hidden one has the weight 0, and
        0 · NaN is NaN, so its key and value count as zeros."""
        pieces, longest, kv_heads, fold, head_dim = q.shape
        slots = group.slots.view(group.pieces, -1)[some].flatten()
        shape = (pieces, -1, kv_heads, head_dim)
        keys, values = (self._read(cache[layer], slots).view(shape) for cache in (self.kv.keys, self.kv.values))
        if own is not None:
            queries = group.queries.view(group.pieces, -1)[some].flatten()
            for read, new in zip((keys, values), own, strict=True):
                read[:, -longest:] = new.index_select(0, queries).view(pieces, longest, kv_heads, head_dim)
        bad = None
        if spoilt:
            bad = ~(keys.sum((2, 3)) + values.sum((2, 3))).isfinite()  # [pieces, width]
            keys, values = (each.masked_fill(bad[:, :, None, None], 0) for each in (keys, values))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        mask = group.mask if len(group.mask) == 1 else group.mask[some]
        if longest == 1:  # a decoding step: nothing to fold, one tile
            out[:, 0] = attend(q[:, 0], keys, values, mask, self.specs[layer])
            return
        folded = q.transpose(1, 2).reshape(pieces, kv_heads, -1, head_dim)
        for begin, end, width in group.tiles:
            rows = slice(begin * fold, end * fold)
            seen_keys, seen_values, seen_mask = keys[:, :, :width], values[:, :, :width], mask[:, :, rows, :width]
            found = attend(folded[:, :, rows], seen_keys, seen_values, seen_mask, self.specs[layer])
            out[:, begin:end] = found.view(pieces, kv_heads, end - begin, fold, head_dim).transpose(1, 2)
        if bad is not None:
            sees = ((mask[:, 0, ::fold] == 0) & bad[:, None]).any(-1)  # [pieces, longest]
            out.masked_fill_(sees[:, :, None, None, None], float("nan"))

    def _read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """[slots, kv_heads, head_dim], in the model's dtype; codes without their scales."""
        found = cache.index_select(0, slots)
        return found if self.kv.scales is None else kv_codes.decode(found, self.kv.dtype)

    def _group(self, pieces: list[Piece], window: int | None = None, *, own: bool = False) -> Group:
        """``window``: most slots that a query sees. ``own``: the queries are branches, whose own keys and values come in the last
        places of the context."""
        longest = max(piece.queries for piece in pieces)
        width = max(len(piece.context) for piece in pieces) + own * longest
        queries = np.empty((len(pieces), longest), np.int64)
        slots = np.empty((len(pieces), width), np.int64)
        for row, piece in enumerate(pieces):
            queries[row, : piece.queries] = np.arange(piece.start, piece.start + piece.queries)
            queries[row, piece.queries :] = piece.start
            slots[row, : len(piece.context)] = piece.context
            slots[row, len(piece.context) :] = piece.context[0]
        counts = np.array([piece.queries for piece in pieces])
        widths = np.array([len(piece.context) for piece in pieces])
        places = np.flatnonzero(np.arange(longest) < counts[:, None])
        padded, flat = len(places) < queries.size, queries.reshape(-1)
        consecutive = bool((np.diff(flat) == 1).all())
        return Group(
            queries=self._there(flat),
            span=slice(int(flat[0]), int(flat[0]) + len(flat)) if consecutive else None,
            real=self._there(places) if padded else None,
            rows=self._there(flat[places]),
            slots=self._there(slots.reshape(-1)),
            mask=self._branch_mask(widths, longest, width) if own else self._mask(counts, widths, longest, width, window),
            tiles=[Tile(0, longest, width)] if own else tiles(longest, width, int((widths - counts).max())),
            pieces=len(pieces),
        )

    def _there(self, places: Longs) -> Tensor:
        return torch.from_numpy(places).to(self.kv.keys.device)

    def _mask(self, counts: Longs, widths: Longs, longest: int, width: int, window: int | None) -> Tensor:
        """Query i of a piece sees the first ``width - count + i + 1`` slots, or the last ``window`` of these. One row serves all if
        the pieces are alike.
        """
        if (counts == counts[0]).all() and (widths == widths[0]).all():
            counts, widths = counts[:1], widths[:1]
        seen = self._there((widths - counts)[:, None] + np.arange(1, longest + 1))  # [pieces, longest]
        place = torch.arange(width, device=seen.device)
        hidden = place >= seen[..., None]
        return self._folded(hidden if window is None else hidden | (place < seen[..., None] - window))

    def _branch_mask(self, lengths: Longs, longest: int, width: int) -> Tensor:
        """Branch i of a piece sees the prefix and, of the last ``longest`` places, its own; one row serves all of one length."""
        lengths = lengths[:1] if (lengths == lengths[0]).all() else lengths
        place = np.arange(width)
        own = place - (width - longest) == np.arange(longest)[:, None]  # [longest, width]
        return self._folded(self._there(~(own | (place < lengths[:, None, None]))))

    def _folded(self, hidden: Tensor) -> Tensor:
        """hidden: [pieces or 1, longest, width] bool. -> as :class:`Group` has it."""
        mask = torch.zeros(hidden.shape, dtype=self.kv.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        return mask[:, None].repeat_interleave(self._fold, 2)


def is_spoilt(x: Tensor) -> bool:
    """Whether an element is no finite number, which is read at once: this backend computes on the CPU."""
    return not bool(x.sum().isfinite())


def spans(count: int, size: int) -> Iterator[slice]:
    """Cut ``count`` places into slices of at most ``size``."""
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def tiles(queries: int, width: int, before: int) -> list[Tile]:
    """Equal tiles of ``queries`` queries. width: slots of the whole context; before: those in front of the first query's own."""
    count = -(-queries // TILE_QUERIES)
    ends = [queries * (place + 1) // count for place in range(count)]
    return [Tile(begin, end, min(width, before + end)) for begin, end in zip([0, *ends], ends, strict=False)]


def cut(segments: Sequence[ExtendSegment], window: int | None = None) -> Iterator[Piece]:
    """The pieces of ``segments``, whose queries see at most ``window`` slots."""
    start = 0
    for count, context in joined(segments):
        before = len(context) - count
        for first in range(0, count, MAX_QUERIES):
            last = min(first + MAX_QUERIES, count)
            seen = 0 if window is None else max(0, before + first + 1 - window)
            yield Piece(start + first, last - first, context[seen : before + last])
        start += count


def joined(segments: Sequence[ExtendSegment]) -> Iterator[tuple[int, Ints]]:
    """Tokens and context of each run of segments that continue each other, such as an item of a catalogue and its query."""
    count, context = 0, EMPTY
    for segment in segments:
        before = segment.context.size - segment.tokens.size
        if count and not (before == context.size and (segment.context[:before] == context).all()):
            yield count, context
            count = 0
        count, context = count + segment.tokens.size, segment.context
    if count:
        yield count, context


def gather_similar(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces of one shape that have many queries, and other pieces of similar shapes for as long as padding stays within
    bounds."""
    shapes: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        shapes.setdefault((piece.queries, len(piece.context)), []).append(piece)
    group: list[Piece] = []
    needed = longest = width = 0
    for (queries, slots), alike in sorted(shapes.items()):
        if len(alike) * queries >= MANY_QUERIES:
            yield from (alike[some] for some in spans(len(alike), max(1, MAX_AREA // (queries * slots))))
            continue
        for piece in alike:
            longest, width = max(longest, queries), max(width, slots)
            padded = (len(group) + 1) * longest * width
            if group and (padded > MAX_WASTE * (needed + queries * slots) or padded > MAX_AREA):
                yield group
                group, needed, longest, width = [], 0, queries, slots
            group.append(piece)
            needed += queries * slots
    if group:
        yield group
