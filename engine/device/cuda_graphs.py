"""Capture of device work and its replay: CUDA graphs, and the table of those captured for one function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

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


Bucket = TypeVar("Bucket", bound=Hashable)


class Graphs(Generic[Bucket]):
    """Captured functions of tensors, one for each bucket."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[Bucket, tuple[tuple[Tensor, ...], Captured]] = {}

    def add(self, bucket: Bucket, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Capture ``function(*inputs)``. Inputs keep their place and may be shared by buckets; add large buckets first, so that the
        others find memory in the pool."""
        self._captured[bucket] = inputs, self._capture(lambda: function(*inputs))

    def replay(self, bucket: Bucket, *values: Tensor) -> Tensor:
        """Copy ``values`` to the first rows of the bucket's inputs, and queue it. The result is valid until the next replay of any
        bucket is queued; rows of inputs that no value covers hold what they held before."""
        inputs, captured = self._captured[bucket]
        for place, value in zip(inputs, values, strict=True):
            place[: len(value)].copy_(value, non_blocking=True)
        captured.replay()
        return captured.output

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets in the order in which they were added."""
        return list(self._captured)
