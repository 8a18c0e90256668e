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
    """Sizes of a layout's tables where they are the same for every step of so many queries, for launches that are captured."""

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
        narrow = min(queries, MOST_NARROW) + most
        fit = min(queries, rows // group)
        merges = min(queries, most * fit, MOST_MERGES)
        return cls(queries, narrow, narrow + (wide + most if wide else 0), merges, 2 * most * fit)

    @property
    def numbers(self) -> int:
        """Numbers in all tables except ``kv_indices``, which comes last with its own length."""
        return self.queries + self.items * ITEM + self.merges * MERGE

    def pack(self, layout: Layout, padding_slot: int) -> Tensor | None:
        """The tables of ``layout``, padded, as :meth:`within` finds them; None where they do not fit. On the host.

        Padding queries have no item, and ``padding_slot`` for a slot of their own.
        """
        wide = len(layout.items) - layout.narrow
        fits = layout.narrow <= self.narrow and wide <= self.items - self.narrow and layout.partials <= self.partials
        if not fits or len(layout.out_cache_loc) > self.queries or len(layout.merges) > self.merges:
            return None
        packed = torch.empty(self.numbers + len(layout.kv_indices), dtype=torch.int64)
        packed[: self.numbers] = 0
        padded = self.within(packed)
        padded.out_cache_loc.fill_(padding_slot)[: len(layout.out_cache_loc)] = layout.out_cache_loc
        padded.items[: layout.narrow] = layout.items[: layout.narrow]
        padded.items[self.narrow : self.narrow + wide] = layout.items[layout.narrow :]
        padded.merges[: len(layout.merges)] = layout.merges
        padded.kv_indices.copy_(layout.kv_indices)
        return packed

    def within(self, packed: Tensor) -> Layout:
        """Views of ``packed``."""
        sizes = [self.queries, self.items * ITEM, self.merges * MERGE]
        out_cache_loc, items, merges, kv_indices = torch.split(packed, [*sizes, len(packed) - self.numbers])
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
    kv_indices = np.concatenate([np.empty(0, np.int32), *contexts]).astype(np.int64)
    items, merges, narrow = cut(qo_indptr, kv_indptr, group=group, kv_heads=kv_heads, rows=rows)
    return Layout(
        qo_indptr=torch.from_numpy(qo_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        kv_indices=torch.from_numpy(kv_indices),
        out_cache_loc=torch.from_numpy(kv_indices[np.repeat(own, queries) + within(queries)]),
        items=torch.from_numpy(items),
        merges=torch.from_numpy(merges),
        narrow=narrow,
        partials=int(items[items[:, 5] >= 0, 1].sum()),
    )


def cut(qo_indptr: Longs, kv_indptr: Longs, *, group: int, kv_heads: int, rows: int) -> tuple[Longs, Longs, int]:
    """(items, merges, narrow items) as :class:`Layout` has them. Longer items come first, so that none is left alone at the end."""
    counts, fit = np.diff(qo_indptr), rows // group
    tiles = -(-counts // fit)
    segment, nth = np.repeat(np.arange(len(counts)), tiles), within(tiles)
    first = nth * fit
    queries = np.minimum(fit, counts[segment] - first)
    own = kv_indptr[segment + 1] - counts[segment] + first
    begin, end = kv_indptr[segment], own + queries
    chunk = max(MIN_CHUNK, -(-int((end - begin).sum()) * kv_heads // PROGRAMS))
    chunks = -(-(end - begin) // chunk)

    tile, nth = np.repeat(np.arange(len(segment)), chunks), within(chunks)
    split = chunks > 1
    partial = cumulate(np.where(split, queries * chunks, 0))[:-1]
    chunk_begin = begin[tile] + nth * chunk
    items = np.stack(
        [
            (qo_indptr[segment] + first)[tile],
            queries[tile],
            chunk_begin,
            np.minimum(chunk_begin + chunk, end[tile]),
            own[tile],
            np.where(split[tile], partial[tile] + nth * queries[tile], -1),
        ],
        axis=1,
    )
    small = items[:, 1] * group <= NARROW
    items = items[np.lexsort((items[:, 2] - items[:, 3], ~small))]

    merged = np.repeat(np.flatnonzero(split), queries[split])
    place = within(queries[split])
    merges = np.stack(
        [(qo_indptr[segment] + first)[merged] + place, partial[merged] + place, chunks[merged], queries[merged]], axis=1
    )
    return items, merges, int(small.sum())


def cumulate(lengths: Longs) -> Longs:
    """[n] -> [n + 1], from 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def within(lengths: Longs) -> Longs:
    """0, 1, ... for each of ``lengths``, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
