"""Layers of encoders on a CPU, by the compiled loops of :mod:`kernels.native`: the end of one layer, or all of them, in one call
for each thread.

A step of one short text takes little more than its products then. Threads that share it wait for each other in loops, without
sleeping, because waking takes longer than what there is to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.int8 import UNGATED, Panels, Projection
from yardstick_llm.kernels.native_attention import NO_DISTANCES, Longs, reach_of
from yardstick_llm.kernels.panels import FloatPanels
from yardstick_llm.kernels.row_chunks import share
from yardstick_llm.kernels.runtime import NOTHING, compiles, flat, loops
from yardstick_llm.kernels.whole_attention import Run, work_of

FEW_TOKENS = 128
"""Most tokens of a step whose threads share the outputs of each product, so that each reads a part of the weights; in larger ones
they share the tokens."""
LEAST_ALONE, MOST_ALONE = 8, 512
"""Small steps that one thread computes after one in which a thread had to wait for long; each time in a row twice as many. Beside
processes that keep all cores busy, a wait lasts until the scheduler lets the other thread run, which is longer than the step."""
PIECE_NUMBERS = 1 << 17
"""Numbers of queries, keys and values that are projected before their sequences attend. They stay in a core's second cache."""
NEVER = 1 << 62
"""A phase that no thread reaches."""
NO_TYPES = np.empty(0, np.int32)
NO_CODES = np.empty(0, np.uint8), np.empty(0, np.int16), 0, NOTHING


class Norm(Protocol):
    """A layer normalisation."""

    eps: float

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class Activation(NamedTuple):
    """The activation function of a feed-forward layer, and its gate."""

    function: str
    """gelu, gelu_tanh, relu, silu or tanh"""
    gated: int
    """:data:`~kernels.int8.UNGATED`, or the half of the first product that the function is applied to."""

    def inner(self, width: int) -> int:
        """Columns of the second product, where the first one has ``width`` outputs."""
        return width if self.gated == UNGATED else width // 2


class LayerParts(NamedTuple):
    """The modules of a layer, in their order."""

    first: Norm | None
    qkv: Projection
    o: Projection
    norm: Norm
    up: Projection
    down: Projection
    last: Norm | None
    """None in a layer whose norms are before attention and feed-forward layer."""
    activation: Activation

    @property
    def before(self) -> bool:
        """Whether its norms are before attention and feed-forward layer; else they are behind."""
        return self.last is None


def takes(layer: LayerParts) -> bool:
    """Whether the loops take the weights of a layer."""
    return all(arrays_of(each) is not None for each in (layer.qkv, layer.o, layer.up, layer.down))


def arrays_of(projection: Projection) -> tuple[Any, ...] | None:
    """A weight as the loops take it; None for one in another form."""
    weight = projection.weight
    if isinstance(weight, FloatPanels):
        return (*NO_CODES, flat(weight.numbers), flat(weight.nothing if projection.bias is None else projection.bias))
    if isinstance(weight, Panels) and weight.is_plain:
        return (*weight.arrays, NOTHING, weight.nothing if projection.bias is None else flat(projection.bias))
    return None


def finish_layer(attended: Tensor, x: Tensor, layer: LayerParts) -> Tensor | None:
    """``last(y + down(function(up(y))))`` with ``y = norm(x + o(attended))``, or ``z + down(function(up(norm(z))))`` with
    ``z = x + o(attended)``, by one loop that computes some rows at a time.

    attended, x: [rows, size] float32 -> [rows, size], or None where the weights have another form.
    """
    weights = [arrays for each in (layer.o, layer.up, layer.down) if (arrays := arrays_of(each)) is not None]
    norm, last, activation = layer.norm, layer.last, layer.activation
    if len(weights) < 3 or not compiles(attended, x, norm.weight):
        return None
    native, out, rows = loops(), torch.empty(x.shape), len(x)
    given = (
        flat(attended), flat(x), weights[0], *_vectors(norm), weights[1],
        getattr(native, activation.function.upper()), activation.gated, activation.inner(len(weights[1][-1])), weights[2],
        *_vectors(last), layer.before, norm.eps, flat(out),
    )  # fmt: skip
    threads = torch.get_num_threads()
    step = max(1, rows if threads == 1 else min(native.BLOCK, -(-rows // threads)))
    spans = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    share(lambda span: native.finish_layer(*given, span.start, span.stop), spans)
    return out


def embed(
    tokens: Tensor,
    positions: Tensor,
    first_position: int,
    types: Tensor | None,
    words: Tensor,
    places: Tensor | None,
    kinds: Tensor | None,
    norm: Norm,
) -> Tensor:
    """Normalised sums of rows of tables. tokens, positions: [tokens] int64, in range, as are ``types``, int32; None: all are 0.
    words, places, kinds: [entries, size] float32, of tokens, positions from ``first_position`` on, and types. -> [tokens, size]"""
    x = torch.empty(len(tokens), words.shape[1])
    of_types = NO_TYPES if types is None else flat(types)
    loops().embed(
        flat(tokens), flat(positions), first_position, of_types, flat(words), flat(places), flat(kinds), *_vectors(norm), norm.eps,
        words.shape[1], flat(x),
    )  # fmt: skip
    return x


class SpinBarrier:
    """A barrier for threads that compute parts of one step; they wait in loops and do not sleep."""

    def __init__(self, threads: int) -> None:
        self.slots = np.zeros(threads * loops().SLOT, np.int64)
        self._lock = threading.Lock()
        self._shared: dict[object, Any] = {}

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the value that belongs to ``key``. The first thread that asks for it makes it."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = make()
            return self._shared[key]

    def wait(self, thread: int, phase: int) -> None:
        """Wait until all threads have reached ``phase``."""
        loops().spin(self.slots, thread, phase)

    @property
    def waited(self) -> bool:
        """Whether a thread had to wait for long, as on cores that other processes use."""
        return bool(self.slots[1 :: loops().SLOT].any())

    def abort(self) -> None:
        """Let no thread wait for the calling one, which has failed."""
        self.slots[:] = NEVER


class EncoderLayers:
    """Layers whose tokens attend to each other in both directions, and whose weights the loops take. It keeps them alive."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        specs: Sequence[AttentionSpec],
        rotations: Sequence[int | None],
        heads: int,
        distances: Tensor | None = None,
        relative: Sequence[Tensor] | None = None,
    ) -> None:
        """``layers``: all of which :func:`takes`. ``specs``: of each, which differ in their windows only. ``rotations``: place of
        each layer's angles, or None. ``distances``: [heads, 2 · most + 1], what is added to the scores of keys from ``most`` places
        before a query to ``most`` after it. ``relative``: of each layer, [2, heads, 2 · most, head_dim], the vectors of distances,
        of a key from ``most`` places before a query to ``most - 1`` after it. The products of queries with the first ones, and of
        keys with the second ones, are added to scores."""
        native, table = loops(), []
        self._kept: list[Any] = []
        related = [NOTHING] * len(layers) if relative is None else map(_in_panels, relative)
        for layer, spec, rotation, of_distances in zip(layers, specs, rotations, related, strict=True):
            row: list[int] = []
            for projection in (layer.qkv, layer.o, layer.up, layer.down):
                arrays = arrays_of(projection)
                assert arrays is not None
                self._kept += arrays
                row += [number for each in arrays for number in (_place(each) if isinstance(each, np.ndarray) else (each,))]
            norms, others = [*_vectors(layer.norm), *_vectors(layer.last)], [*_vectors(layer.first), of_distances]
            self._kept += norms + others
            row += [number for each in norms for number in _place(each)]
            row += [reach_of(spec), -1 if rotation is None else rotation]
            row += [number for each in others for number in _place(each)]
            table.append(row)
        first, (function, gated) = layers[0], layers[0].activation
        self._size, self._width, self._before = len(first.norm.weight), len(first.up.weight), first.before
        self._inner, self._heads = first.activation.inner(self._width), heads
        of_function, scale = getattr(native, function.upper()), np.float32(specs[0].scale_of(self._size // heads))
        added = NO_DISTANCES[0] if distances is None else distances.numpy(force=True)
        of_layers = np.array(table, np.int64), heads, of_function, gated, self._inner, self._before
        self._given = *of_layers, first.norm.eps, scale, added
        self._can_be_narrow = native.HAS_PAIRS and self._size // heads % 2 == 0
        self._alone, self._pause = 0, LEAST_ALONE

    def __call__(
        self,
        x: Tensor,
        rotations: tuple[Tensor, Tensor],
        runs: tuple[Run, ...],
        spans: Sequence[slice],
        *,
        whole: bool,
        narrow: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute a step, or the part of one that a thread computes alone.

        x: [tokens, size], contiguous, the embeddings, which are overwritten. ``rotations``: cos and sin,
        [rotations, tokens, head_dim / 2], see :func:`kernels.rope.rope`. ``runs``: its sequences. ``spans``: the tokens of each
        thread. -> the output of the last layer's attention, and the layer's input; if ``whole``, the output of the last layer in
        its place. ``narrow``: see :func:`kernels.native_attention.native_attention`.
        """
        tokens, few = len(x), len(spans) > 1 and len(x) <= FEW_TOKENS
        if few and self._is_crowded():
            spans = [slice(0, tokens)]
        by_outputs, all_tokens = few and len(spans) > 1, slice(0, tokens)
        size, barrier = self._size, SpinBarrier(len(spans))
        attended, qkv = torch.empty(x.shape), np.empty(min(len(spans), 2) * tokens * 3 * size, np.float32)
        angles = [each.flatten(1).numpy() for each in rotations]
        most = 2 * size + self._width + self._inner if by_outputs else size * self._before
        between = np.empty(tokens * most, np.float32)
        codes, scales, sums = (
            np.empty(tokens * max(size, self._inner), np.uint8),
            np.empty(tokens, np.float32),
            np.empty(tokens, np.int32),
        )
        given = (*self._given, narrow and self._can_be_narrow, *angles, flat(x), flat(attended), qkv, between, codes, scales, sums)

        def compute(which: slice) -> None:
            thread, span = which.start, spans[which.start]
            queries = all_tokens if by_outputs else span
            work = work_of(runs, queries.start, queries.stop, self._heads, size // self._heads, self._heads)
            tasks = np.ascontiguousarray(work.tasks[thread :: len(spans)]) if by_outputs else work.tasks
            bounds = np.array([(span.stop, len(tasks))])
            if len(spans) == 1:
                tasks, bounds = _pieces(runs, self._heads, size // self._heads, max(1, PIECE_NUMBERS // (3 * size)))
            shared = barrier.slots, thread, span.start, span.stop, by_outputs, whole
            try:
                loops().encode(*given, work.rows, tasks, bounds, queries.start, *shared)
            except BaseException:
                barrier.abort()
                raise

        share(compute, [slice(place, place + 1) for place in range(len(spans))], len(spans))
        if by_outputs:
            self._alone, self._pause = (self._pause, min(2 * self._pause, MOST_ALONE)) if barrier.waited else (0, LEAST_ALONE)
        return attended, x

    def _is_crowded(self) -> bool:
        """Whether one thread should compute the next small step, because others have had to wait lately."""
        self._alone -= (crowded := self._alone > 0)
        return crowded


@lru_cache(16)
def _pieces(runs: tuple[Run, ...], heads: int, head_dim: int, least: int) -> tuple[Longs, Longs]:
    """The tasks of all sequences in the order of their tokens, and the bounds of pieces of about ``least`` tokens, or one sequence:
    see :func:`kernels.native.encode`."""
    ends = np.concatenate([run.start + run.length * np.arange(1, run.sequences + 1) for run in runs])
    tasks = work_of(runs, 0, int(ends[-1]), heads, head_dim, heads).tasks
    tasks = tasks[np.argsort(tasks[:, 0], kind="stable")]
    stops = ends[np.flatnonzero(np.diff(ends // least, append=-1))]
    return tasks, np.stack([stops, np.searchsorted(tasks[:, 0], stops)], 1)


def _vectors(norm: Norm | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Weight and bias; empty where there are none."""
    return (NOTHING, NOTHING) if norm is None else (flat(norm.weight), flat(norm.bias))


def _in_panels(relative: Tensor) -> np.ndarray[Any, Any]:
    """See :func:`kernels.native.attend`."""
    lanes = loops().LANES
    return flat(relative.view(2, relative.shape[1], -1, lanes, relative.shape[3]).transpose(3, 4).contiguous())


def _place(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Address and elements."""
    return array.ctypes.data, len(array)
