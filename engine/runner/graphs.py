"""CUDA graphs of steps: the launches of a step are captured once, at the start, and replayed together.

A graph repeats the same launches on the same addresses, so each is captured for a *bucket*, a number of tokens, and smaller steps
are padded to it. The inputs of a step lie in tensors that never move, filled by copies in the same stream, so a step may be
queued while the one before still runs. Steps that fit no bucket are launched kernel by kernel.

Small steps are captured whole, with the Triton backend's attention. Large ones (:data:`LARGE_BUCKETS`) are captured up to the last
layer's attention, with the attention of the engine's backend; the rest of the last layer is launched for the rows that are read,
which are few. Launching a large step takes longer than computing it: 14 to 20 ms of the host for 8,160 tokens of Qwen3-0.6B, which
an H100 computes in 15 ms.

The processes that share a model each have the graphs of their part, in which the sums over all of them are captured too
(:mod:`engine.runner.capturing`). Their large steps are captured whole.

An engine with LoRA adapters has two graphs for each bucket, so that steps of the base model alone do no work for adapters.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from yardstick_llm.engine.models.decoder import Attend
from yardstick_llm.engine.models.encoder import Model
from yardstick_llm.engine.models.lora.linear import CapturedRows
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.kernels.runtime import AVAILABLE, INTERPRETED, triton

logger = logging.getLogger(__name__)


STREAMS = 32
"""Streams of a device that torch hands out, one after the other (``kStreamsPerPool`` in its ``c10/cuda/CUDAStream.cpp``)."""


class Captured(NamedTuple):
    """Captured work that can be replayed."""

    output: Tensor
    """Tensor of the result. It has the same address in every replay."""
    replay: Callable[[], None]


class Capture(Protocol):
    """Turns work on the device into something to replay."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Capture ``work``, which may run more than once. A replay reads the same tensors, as they are by then."""

    @property
    def allocated(self) -> int:
        """Bytes that everything captured holds on the device."""


class CudaCapture:
    """CUDA graphs that share one memory pool. They may replay in any order, but one at a time and in one stream.

    They also share the workspace that cuBLAS has for the stream of their capture. torch frees it with the first graph of that
    stream that is destroyed, and the others would then write to memory that belongs to other tensors
    (https://github.com/pytorch/pytorch/issues/193402). So this object keeps all of its graphs, one whose capture failed too, and
    has a stream that no other object captures on.
    """

    _living: ClassVar[WeakSet[CudaCapture]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if other objects have all streams."""
        self._device = device
        self._stream: torch.cuda.Stream = _unused_stream(device, [other._stream for other in self._living])
        self._living.add(self)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._free_before, _ = torch.cuda.mem_get_info(device)

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # torch.cuda.graph does not restore the current stream if a capture fails, but this context does.
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and lets libraries allocate; neither may happen during the capture
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            self._graphs.append(graph)
            try:
                with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    output = work()
            except Exception:
                self._leave_pool()
                raise
        return Captured(output, graph.replay)

    @property
    def allocated(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, self._free_before - free)

    def _leave_pool(self) -> None:
        """End the allocation to the pool, as torch before 2.13 does not if CUDA refuses what was captured. Otherwise no capture
        could follow, because each begins with freeing unused memory, which torch does not do while one goes on."""
        with suppress(RuntimeError):  # has ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def _unused_stream(device: torch.device, used: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream:
    """A stream, because the default one cannot be captured, that is not among ``used``. torch hands out :data:`STREAMS` in turn."""
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream not in used:
            return stream
    raise RuntimeError(f"each of torch's {STREAMS} streams has CUDA graphs")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector off: during a capture, CUDA may refuse to destroy what it finds, such as older graphs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Key = TypeVar("Key", bound=Hashable)


class Graphs(Generic[Key]):
    """Captured functions of tensors, one for each bucket."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[Key, tuple[tuple[Tensor, ...], Captured]] = {}

    def add(self, bucket: Key, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Capture ``function(*inputs)``. Inputs keep their place and may be shared by buckets; add large buckets first, so that the
        others find memory in the pool."""
        self._captured[bucket] = inputs, self._capture(lambda: function(*inputs))

    def replay(self, bucket: Key, *values: Tensor) -> Tensor:
        """Copy ``values`` to the first rows of the bucket's inputs, and queue it. The result is valid until the next replay of any
        bucket is queued; rows of inputs that no value covers hold what they held before."""
        inputs, captured = self._captured[bucket]
        for place, value in zip(inputs, values, strict=True):
            place[: len(value)].copy_(value, non_blocking=True)
        captured.replay()
        return captured.output

    @property
    def buckets(self) -> list[Key]:
        """All buckets in the order in which they were added."""
        return list(self._captured)


class Compilations:
    """Kernels that this process compiled or loaded from Triton's cache on disk. One object at a time counts."""

    def __init__(self) -> None:
        self.early = 0
        """Before :meth:`ready`."""
        self.late = 0
        """Since then, while requests waited."""
        self._ready = False
        if AVAILABLE and not INTERPRETED:
            triton.knobs.runtime.jit_post_compile_hook = self._count  # type: ignore[assignment, unused-ignore]

    def ready(self) -> None:
        """Begin to serve: compilations from now on are late, and logged."""
        self._ready = True

    def _count(self, *, repr: str, **_: Any) -> None:
        """Triton's hook. repr: the kernel, its options and the types of its arguments."""
        if not self._ready:
            self.early += 1
            return
        self.late += 1
        logger.warning("compiled a kernel while requests waited: %s", repr)


BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 800, 896, 1024)
"""Tokens of steps that are captured whole."""
LARGE_BUCKETS = (1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384)
"""Tokens of larger steps; at most a fifth of a step is padding."""
GRAPH_BYTES = 16 << 20
"""Memory of a large graph itself, besides the tensors that all share."""


class FixedAttention(Protocol):
    """Attention from tables of fixed address, so that a CUDA graph can capture it."""

    layouts: int
    """Number of layouts of the tables. A graph is captured for each."""

    def attend(self, tokens: int, layout: int = 0) -> Attend:
        """Attention of a step of ``tokens``, as :meth:`fill` last described it in ``layout``; until then all are padding."""

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int | None:
        """Queue the tables of ``segments``, padded to ``tokens``, and return their layout; None where they fit none. Padding is
        written to the padding slot and never read.
        """


class Bucket(NamedTuple):
    """Sizes that a graph is captured for."""

    tokens: int
    layout: int
    adapted: bool
    """Whether requests have adapters."""


class StepGraphs:
    """The model's part of a step, from tokens to hidden rows, captured for every one of ``buckets``."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        attention: FixedAttention,
        capture: Capture,
        buckets: Sequence[int] = BUCKETS,
        adapters: CapturedRows | None = None,
        *,
        above: int = 0,
        whole: bool = True,
        plan: Callable[[Sequence[ExtendSegment]], None] | None = None,
    ) -> None:
        """``adapters``: None in an engine without adapters. ``above``: steps of no more tokens are left to others. ``whole``:
        capture all of the last layer; otherwise launch what follows its attention, for the rows that are read. ``plan``: is given
        the segments of a step before it is replayed.
        """
        self._model = model
        self._attention = attention
        self._adapters = adapters
        self._sizes = sorted(buckets)
        self._above = above
        self._plan = plan
        self._graphs: Graphs[Bucket] = Graphs(capture)
        self.replayed = 0
        """Steps so far."""
        start = time.monotonic()
        weight = model.embed.weight
        tokens, positions = torch.zeros(2, max(buckets), dtype=torch.int64, device=weight.device)
        self._residual = None if whole else torch.empty(max(buckets), weight.shape[1], dtype=weight.dtype, device=weight.device)
        for size, layout in itertools.product(reversed(self._sizes), range(attention.layouts)):
            attend = attention.attend(size, layout)
            for adapted in (False,) if adapters is None else (False, True):
                with adapters.captured(size) if adapters is not None and adapted else nullcontext():
                    self._graphs.add(Bucket(size, layout, adapted), partial(self._compute, attend), tokens[:size], positions[:size])
        logger.info(
            "CUDA graphs: captured for %s tokens in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment], rows: Tensor) -> Tensor | None:
        """tokens, positions: [tokens] int64, those of ``segments``; rows: [rows] int64, of the tokens. -> [rows, hidden], valid
        until the next step is queued.

        None where no bucket fits.
        """
        count = len(tokens)
        size = next((size for size in self._sizes if size >= count), None)
        layout = None if size is None or count <= self._above else self._attention.fill(segments, size)
        if size is None or layout is None:
            return None
        adapted = self._adapters is not None and self._adapters.active
        if self._adapters is not None and adapted:
            self._adapters.fill(size)
        if self._plan is not None:
            self._plan(segments)
        self.replayed += 1
        found = self._graphs.replay(Bucket(size, layout, adapted), tokens, positions)[:count]
        if self._residual is None:
            return found.index_select(0, rows)
        if not len(rows):
            return self._residual[:0]
        residual = self._residual[:count]
        if len(rows) < count:
            return self._model.from_last_attention(found, residual, rows)
        return self._model.from_last_attention(found, residual).index_select(0, rows)

    def _compute(self, attend: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden rows, [tokens, hidden], or the output of the last layer's attention, [tokens, heads · head_dim]."""
        if self._residual is None:
            return self._model(tokens, positions, attend)  # type: ignore[no-any-return]
        attended, residual = self._model.to_last_attention(tokens, positions, attend)
        self._residual[: len(tokens)].copy_(residual)
        return attended
