"""Attention of whole sequences, whose tokens all attend to each other; without slots.

On a GPU it is the project's Triton kernel, which a CUDA graph can capture: all that steps differ in is in its table of blocks.
What plain PyTorch computes, biases by distance and ALiBi, is cut into calls by the lengths of a step, so it cannot be captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.encoder import Encoder, Packed, Part
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import ScoringRequest
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.encoder_layers import SpinBarrier
from yardstick_llm.kernels.runtime import loops
from yardstick_llm.kernels.whole_attention import (
    ROWS,
    Layout,
    cut,
    lay_out,
    runs_of,
    whole_attention,
    whole_attention_native,
    whole_attention_triton,
)

SHORT = 8
"""A captured step has room for the blocks of sequences of this many tokens on average."""
FEW_BLOCKS = 64
"""Least number of blocks that a captured step has room for, unless it has fewer tokens."""
PART, LEAST_PART = 1024, 64
"""Tokens of a part of a step, and fewest where a thread would have none otherwise. Each part reads all weights, which takes as long
as some 40 tokens take to compute, in float32 and in int8 (12 GB/s; 130 and 500 multiplications a nanosecond). Where threads share
the weights, the rows of a tile of products are enough."""
UNEVEN = 1.1
"""How many times the mean of all threads one may compute before sequences are cut."""


def divide(lengths: Sequence[int], threads: int, *, cuts: bool, least: int = LEAST_PART) -> list[slice]:
    """The parts of a step, of at least as many tokens where a thread would have none otherwise. With ``cuts``, there is one for
    each thread, and sequences are cut, where whole ones would not keep all threads busy."""
    total = sum(lengths)
    threads = max(1, min(threads, total // least))
    count = min(len(lengths), max(threads, -(-total // PART)))
    bounds = [0, total] if count == 1 else _whole_parts(lengths, count)
    busy = [0] * threads
    for begin, end in itertools.pairwise(bounds):
        busy[busy.index(min(busy))] += end - begin
    if cuts and max(busy) > UNEVEN * total / threads:
        tile = loops().ROWS
        bounds = [(total * place // threads + tile // 2) // tile * tile for place in range(threads)] + [total]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]


def _whole_parts(lengths: Sequence[int], count: int) -> list[int]:
    """Bounds of ``count`` parts of whole sequences, about alike; fewer where sequences are long."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    wanted = np.arange(1, count) * (total / count)
    places = np.searchsorted(ends, wanted)
    before = np.where(places > 0, ends[places - 1], 0)
    inner = np.where(ends[places] - wanted < wanted - before, ends[places], before)
    return np.unique([0, *inner, total]).tolist()  # type: ignore[no-any-return]


class WholeAttention:
    """Plans the attention of each step."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        *,
        typed: bool = False,
        biased: Encoder | None = None,
        slopes: Tensor | None = None,
        cuts: bool = False,
        narrow: bool = False,
        threads: int | None = None,
    ) -> None:
        """``specs``: of each layer. ``typed``: whether the model has token types. ``biased``: the model, if it adds something
        to the scores by the distance of two tokens. ``slopes``, ``narrow``: see :func:`~kernels.whole_attention.whole_attention`.
        ``cuts``: whether compiled loops attend, so that threads may share a sequence. ``threads``: of
        a CPU, for models whose layers are computed in one call; None: those that torch has when a step is planned."""
        self._threads = threads
        self._cuts = cuts and biased is None and slopes is None
        self._narrow = narrow
        self._slopes = slopes
        self._biased = biased
        if biased is not None:
            biased.distances_of(1)  # makes its table, whose copy to a GPU would let a step wait
        self.specs = list(specs)
        self.device = device
        self.typed = typed
        backend = "triton" if device.type == "cuda" and biased is None and slopes is None else "reference"
        self.description = wire.AttentionChoice(backend, "all tokens of a sequence attend to each other")

    def plan(self, segments: Sequence[ExtendSegment]) -> Packed:
        """Prepare a step once for all layers. Each segment is a whole sequence."""
        types, (lengths, unseen) = self.types(segments), _lengths(segments)
        if types is not None and self.device.type != "cpu":
            types = types.pin_memory().to(self.device, non_blocking=True)
        model = self._biased
        distances = {} if model is None else {length: model.distances_of(length) for length in dict.fromkeys(lengths)}
        threads, spans = torch.get_num_threads() if self._threads is None else self._threads, list[slice]()
        if self.device.type == "cpu" and threads > 1:
            spans = divide(lengths, threads, cuts=self._cuts, least=LEAST_PART if self._threads is None else loops().ROWS)
        whole = self._packed(lengths, unseen, types, distances)
        if len(spans) < 2:  # one thread computes the step, or all share its operations
            return whole
        parts = self._parts(spans, whole, lengths, unseen, distances)
        return replace(whole, parts=parts) if parts else replace(whole, spans=spans)

    def _packed(
        self, lengths: Sequence[int], unseen: Sequence[int], types: Tensor | None, distances: Mapping[int, Tensor]
    ) -> Packed:
        layout = lay_out(lengths, self.device, unseen)
        return Packed(partial(self._attend, layout, distances), types, layout, threads=self._threads, narrow=self._narrow)

    def _parts(
        self,
        spans: Sequence[slice],
        whole: Packed,
        lengths: Sequence[int],
        unseen: Sequence[int],
        distances: Mapping[int, Tensor],
    ) -> list[Part]:
        """The parts of a step that threads compute; none where sequences are cut and layers are one call, which divides them."""
        ends, types = np.cumsum(lengths), whole.types
        stops = [span.stop for span in spans]
        lasts = np.searchsorted(ends, stops)
        parts, first = [], 0
        if np.array_equal(ends[lasts], stops):
            for span, stop in zip(spans, (lasts + 1).tolist(), strict=True):
                own = None if types is None else types[span]
                parts.append(Part(span, self._packed(lengths[first:stop], unseen[first:stop], own, distances)))
                first = stop
            return parts
        if self._threads is not None:
            return []
        barrier, layout = SpinBarrier(len(spans)), whole.layout
        for thread, span in enumerate(spans):
            attend = partial(self._attend_cut, barrier, thread, layout, span)
            own = None if types is None else types[span]
            parts.append(Part(span, Packed(attend, own, layout, barrier=barrier, narrow=self._narrow)))
        return parts

    def _attend_cut(
        self, barrier: SpinBarrier, thread: int, layout: Layout, part: slice, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Keys and values of layers take turns in two places, because other threads may still read those of the layer before."""
        keys, values = barrier.shared(layer % 2, lambda: k.new_empty(2, layout.tokens, *k.shape[1:]))
        keys[part], values[part] = k, v
        barrier.wait(thread, layer + 1)
        return whole_attention_native(q, keys, values, layout, self.specs[layer], part, narrow=self._narrow)

    def _attend(self, layout: Layout, distances: Mapping[int, Tensor], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        model = self._biased
        bias = None if model is None else partial(model.score_bias, layer, distances)
        return whole_attention(q, k, v, layout, self.specs[layer], bias, slopes=self._slopes, narrow=self._narrow)

    def types(self, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """[tokens] int32 on the host: 1 for the second text of a pair; None if there is none."""
        firsts = [segment.request.first_tokens if isinstance(segment.request, ScoringRequest) else 0 for segment in segments]
        if not (self.typed and any(firsts)):
            return None
        lengths = [segment.tokens.size for segment in segments]
        parts = np.array([(first, length - first) for first, length in zip(firsts, lengths, strict=True)]).ravel()
        kinds = np.array([(0, int(first > 0)) for first in firsts]).ravel()
        return torch.from_numpy(np.repeat(kinds, parts).astype(np.int32))


def _lengths(segments: Sequence[ExtendSegment]) -> tuple[list[int], list[int]]:
    """Tokens of each sequence, and those at its end to which no token attends."""
    unseen = [segment.request.unseen_tokens if isinstance(segment.request, ScoringRequest) else 0 for segment in segments]
    return [segment.tokens.size for segment in segments], unseen


class FixedWholeAttention:
    """The kernel's attention from tables of fixed address and size, so that a CUDA graph can capture it.

    A block of padding has no queries and does nothing. Rows of padding hold any numbers, which no other row reads.
    """

    layouts = 1

    def __init__(self, whole: WholeAttention, most_tokens: int) -> None:
        self._whole = whole
        numbers = 4 * _most_blocks(most_tokens) + most_tokens
        self._tables = torch.zeros(numbers, dtype=torch.int32, device=whole.device)

    def attend(self, tokens: int, layout: int = 0) -> Packed:  # noqa: ARG002
        """Attention of a step of ``tokens``, as :meth:`fill` last described it; until then all of them are padding."""
        blocks, types = self._parts(self._tables, tokens)
        laid_out, specs = Layout([], blocks), self._whole.specs

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return whole_attention_triton(q, k, v, laid_out, specs[layer])

        return Packed(attend, types if self._whole.typed else None, laid_out)

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int | None:
        """Queue the copy of the tables of ``segments``, padded to ``tokens``. None, and no copy, where they do not fit."""
        found, given = cut(runs_of(*_lengths(segments))), self._whole.types(segments)
        if len(found) > _most_blocks(tokens):
            return None
        packed = torch.zeros(4 * _most_blocks(tokens) + tokens, dtype=torch.int32, pin_memory=self._tables.is_cuda)
        blocks, types = self._parts(packed, tokens)
        blocks[: len(found)] = found
        if given is not None:
            types[: len(given)] = given
        self._tables[: len(packed)].copy_(packed, non_blocking=True)
        return 0

    def _parts(self, tables: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The blocks and the types of tokens, of a step of ``tokens``."""
        numbers = 4 * _most_blocks(tokens)
        return tables[:numbers].view(-1, 4), tables[numbers : numbers + tokens]


def _most_blocks(tokens: int) -> int:
    """Blocks of a captured step. One for each token would start a program for each head and token, most of them without work."""
    return min(tokens, max(FEW_BLOCKS, tokens // ROWS + tokens // SHORT))
