"""Layout of attention of segments over slots, cut into work for a GPU: on the host, from lengths alone, without waiting for the
device.

A *tile* is as many consecutive queries of one segment as fill a block, with the query heads of one key head side by side, so that
keys are read once for all of them. An *item* is a tile and the chunk of its context that one program reads. A tile whose context
is long beside the rest of the step has several items, whose results are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Longs = npt.NDArray[np.int64]
Lengths = Sequence[int] | npt.NDArray[np.integer]

NARROW = 16
"""Rows of the smaller block, the least that a matrix product takes. It serves decoding and the ends of segments."""
MIN_CHUNK = 256
"""Keys worth a program of their own."""
PROGRAMS = 256
"""About two for each processor of a large GPU: fewer leave some of them idle."""
MOST_NARROW, MOST_MERGES = 1024, 1024
"""Room for as many in tables of fixed size, however many tokens: a program for padding does nothing, but it starts."""
FEW_NARROW = 384
"""Room for narrow items of steps with more tokens than :data:`MOST_NARROW`, which are mostly prompts: 256 decoding rows, and
the ends of prompts and items."""
ITEM, MERGE = 6, 4
"""Columns of the tables."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which queries attend to which slots, and how the work is cut; int64, on the host or on a device.

    A row of zeros in ``items`` or ``merges`` does nothing, so that a captured launch can be padded.
    """

    qo_indptr: Tensor
    """[segments + 1] cumulative numbers of queries. Only the reference reads it and ``kv_indptr``; both are empty in tables of
    fixed size.
    """
    kv_indptr: Tensor
    """[segments + 1] start of each segment's context in ``kv_indices``"""
    kv_indices: Tensor
    """[sum of context lengths] slots of each segment's context"""
    out_cache_loc: Tensor
    """[queries] slots that the queries' own keys and values are written to"""
    items: Tensor
    """[items, 6]: first query, queries, first and past the last place in ``kv_indices``, place of the first query's own slot, first
    row of partial results or -1 where the item is the tile's only one"""
    merges: Tensor
    """[queries of tiles with several items, 4]: query, its row in the first item's partial results, items, rows between them"""
    narrow: int
    """Number of items, the first ones, that fit the smaller block."""
    partials: int
    """Rows of partial results."""

    def to(self, device: torch.device) -> Layout:
        """The layout on ``device``, copied without waiting."""
        tables = (self.qo_indptr, self.kv_indptr, self.kv_indices, self.out_cache_loc, self.items, self.merges)
        packed = torch.cat([table.flatten() for table in tables])
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        parts = torch.split(packed, [table.numel() for table in tables])
        qo_indptr, kv_indptr, kv_indices, out_cache_loc, items, merges = (
            part.view(table.shape) for part, table in zip(parts, tables, strict=True)
        )
        return Layout(qo_indptr, kv_indptr, kv_indices, out_cache_loc, items, merges, self.narrow, self.partials)


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of a layout's tables that fit every step of up to this number of queries, for captured launches."""

    queries: int
    narrow: int
    """Items for the smaller block, which come first."""
    items: int
    merges: int
    partials: int

    @classmethod
    def of(cls, queries: int, *, group: int, kv_heads: int, rows: int) -> Room:
        """Sizes for any result of :func:`cut` for ``queries``, except for very many narrow items or merges.

        Contexts are cut into chunks of at least their sum over ``most``. So fewer than ``most`` tiles have several chunks, these
        give fewer than twice ``most`` items, and cutting adds fewer than ``most`` items in all.
        """
        most = -(-PROGRAMS // kv_heads)
        wide = queries // (NARROW // group + 1)  # upper bound: a tile that is not narrow has more than NARROW // group queries
        narrow = (queries if queries <= MOST_NARROW else FEW_NARROW) + most
        fit = min(queries, rows // group)
        merges = min(queries, most * fit, MOST_MERGES)
        return cls(queries, narrow, narrow + (wide + most if wide else 0), merges, 2 * most * fit)

    @property
    def numbers(self) -> int:
        """Numbers in all tables except ``kv_indices``, which comes last with its own length."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.queries, self.items * ITEM, self.merges * MERGE

    def pack(self, layout: Layout, padding_slot: int) -> Tensor | None:
        """The tables of ``layout``, padded, as :meth:`within` finds them; None where they do not fit. On the host.

        Padding queries have no item, and ``padding_slot`` for a slot of their own.
        """
        wide = len(layout.items) - layout.narrow
        fits = layout.narrow <= self.narrow and wide <= self.items - self.narrow and layout.partials <= self.partials
        if not fits or len(layout.out_cache_loc) > self.queries or len(layout.merges) > self.merges:
            return None
        packed = np.empty(self.numbers + len(layout.kv_indices), np.int64)
        packed[: self.numbers] = 0
        slots, items, merges = self._sizes
        packed[:slots] = padding_slot
        starts = 0, slots, slots + self.narrow * ITEM, slots + items, slots + items + merges
        tables = (
            layout.out_cache_loc,
            layout.items[: layout.narrow],
            layout.items[layout.narrow :],
            layout.merges,
            layout.kv_indices,
        )
        for start, table in zip(starts, tables, strict=True):
            packed[start : start + table.numel()] = table.numpy().reshape(-1)
        return torch.from_numpy(packed)

    def within(self, packed: Tensor) -> Layout:
        """Views of ``packed``."""
        out_cache_loc, items, merges, kv_indices = torch.split(packed, [*self._sizes, len(packed) - self.numbers])
        nothing = packed[:0]
        tables = items.view(-1, ITEM), merges.view(-1, MERGE)
        return Layout(nothing, nothing, kv_indices, out_cache_loc, *tables, narrow=self.narrow, partials=self.partials)


def lay_out(query_lengths: Lengths, contexts: Sequence[npt.NDArray[np.integer]], *, group: int, kv_heads: int, rows: int) -> Layout:
    """Cut the work of segments with these numbers of queries and lists of slots, on the host.

    group: query heads for each key head; rows: of the larger block.
    """
    queries = np.asarray(query_lengths, np.int64)
    qo_indptr, kv_indptr = cumulate(queries), cumulate(np.array([len(context) for context in contexts], np.int64))
    own = kv_indptr[1:] - queries  # start of each segment's own slots
    kv_indices = np.concatenate([np.empty(0, np.int32), *contexts], dtype=np.int64)
    items, merges, narrow = cut(qo_indptr, kv_indptr, group=group, kv_heads=kv_heads, rows=rows)
    return Layout(
        qo_indptr=torch.from_numpy(qo_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        kv_indices=torch.from_numpy(kv_indices),
        out_cache_loc=torch.from_numpy(kv_indices[np.repeat(own, queries) + within(queries)]),
        items=torch.from_numpy(items),
        merges=torch.from_numpy(merges),
        narrow=narrow,
        partials=int(items[items[:, 5] >= 0, 1].sum()) if len(merges) else 0,
    )


def cut(qo_indptr: Longs, kv_indptr: Longs, *, group: int, kv_heads: int, rows: int) -> tuple[Longs, Longs, int]:
    """(items, merges, narrow items) as :class:`Layout` has them. Longer items come first, so that none is left alone at the end."""
    items = _tiles(qo_indptr, kv_indptr, rows // group)
    lengths = items[:, 3] - items[:, 2]
    chunk = max(MIN_CHUNK, -(-int(lengths.sum()) * kv_heads // PROGRAMS))
    merges = np.empty((0, MERGE), np.int64)
    if lengths.max(initial=0) > chunk:
        items, merges = _split(items, -(-lengths // chunk), chunk)
        lengths = items[:, 3] - items[:, 2]
    small = items[:, 1] * group <= NARROW
    return items[np.lexsort((-lengths, ~small))], merges, int(small.sum())


def _tiles(qo_indptr: Longs, kv_indptr: Longs, fit: int) -> Longs:
    """Items of tiles of at most ``fit`` queries with their whole context, in order."""
    counts, ends = np.diff(qo_indptr), kv_indptr[1:]
    if counts.max(initial=0) <= fit:  # as in steps that decode
        return _columns(qo_indptr[:-1], counts, kv_indptr[:-1], ends, ends - counts, -1)
    tiles = -(-counts // fit)
    segment, first = np.repeat(np.arange(len(counts)), tiles), within(tiles) * fit
    queries = np.minimum(fit, counts[segment] - first)
    own = ends[segment] - counts[segment] + first
    return _columns(qo_indptr[segment] + first, queries, kv_indptr[segment], own + queries, own, -1)


def _split(tiles: Longs, chunks: Longs, chunk: int) -> tuple[Longs, Longs]:
    """(items, merges) of ``tiles``, each in as many ``chunks`` of at most ``chunk`` slots."""
    first, queries, begin, end, own, _ = tiles.T
    tile, nth = np.repeat(np.arange(len(tiles)), chunks), within(chunks)
    split = chunks > 1
    partial = cumulate(np.where(split, queries * chunks, 0))[:-1]
    chunk_begin = begin[tile] + nth * chunk
    chunk_end = np.minimum(chunk_begin + chunk, end[tile])
    partials = np.where(split[tile], partial[tile] + nth * queries[tile], -1)
    items = _columns(first[tile], queries[tile], chunk_begin, chunk_end, own[tile], partials)
    merged = np.repeat(np.flatnonzero(split), queries[split])
    place = within(queries[split])
    return items, _columns(first[merged] + place, partial[merged] + place, chunks[merged], queries[merged])


def _columns(first: Longs, *others: Longs | int) -> Longs:
    """A table of these columns."""
    table = np.empty((len(first), 1 + len(others)), np.int64)
    for place, column in enumerate((first, *others)):
        table[:, place] = column
    return table


def cumulate(lengths: Longs) -> Longs:
    """[n] -> [n + 1], from 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def within(lengths: Longs) -> Longs:
    """0, 1, ... for each of ``lengths``, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
