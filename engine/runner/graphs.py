"""Small steps without their launches: what the processor would queue kernel by kernel is captured once, at the start, and replayed.

A graph repeats the same launches on the same addresses, so each is captured for a *bucket*, a number of tokens, and smaller steps
are padded to it. What a step reads lies in tensors that never move, and they are filled by copies in the same stream: a step may be
queued while the one before still runs. Steps that fit no bucket are launched as ever.

Attention inside graphs is always the Triton backend's. Its tables are plain tensors that can be padded. FlashInfer keeps the plan
of a step in a pinned buffer of its own, which a second step in flight would overwrite, and fixes the rows as well as the tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.core import ExtendSegment
from engine.models.decoder import Attend, Decoder

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
"""Tokens. Beyond the last, computing a step takes longer than launching it."""


class Captured(NamedTuple):
    """Work that can be done again."""

    output: Tensor
    """Where its result is, each time."""
    replay: Callable[[], None]


class Capture(Protocol):
    """Turns work on the device into something to replay."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Do ``work``, maybe more than once. Replaying it reads the same tensors again, with what they hold by then."""

    @property
    def allocated(self) -> int:
        """Bytes that everything captured holds on the device."""


class CudaCapture:
    """CUDA graphs of one memory pool. They may replay in any order, but only one at a time, in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default one cannot be captured
        self._pool = torch.cuda.graph_pool_handle()
        self._free_before, _ = torch.cuda.mem_get_info(device)

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and makes libraries allocate, which must not happen during the capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = work()
        return Captured(output, graph.replay)

    @property
    def allocated(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, self._free_before - free)


Bucket = TypeVar("Bucket", bound=Hashable)


class Graphs(Generic[Bucket]):
    """Functions of tensors, captured, one a bucket."""

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
        """As they were added."""
        return list(self._captured)


class FixedAttention(Protocol):
    """Attention whose tables stay where they are, so that it can be captured."""

    def attend(self, tokens: int) -> Attend:
        """For a step of ``tokens``, as :meth:`fill` last described it."""

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> bool:
        """Queue the tables of ``runs``, padded to ``tokens``; False where they do not fit. Padding is written to the padding slot
        and read by nobody."""


class StepGraphs:
    """The decoder's part of a step, from tokens to hidden rows, captured for every one of ``buckets``."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, attention: FixedAttention, capture: Capture, buckets: Sequence[int] = BUCKETS) -> None:
        self._attention = attention
        self._sizes = sorted(buckets)
        self._graphs: Graphs[int] = Graphs(capture)
        self.replayed = 0
        """Steps so far."""
        start = time.monotonic()
        tokens, positions = torch.zeros(2, max(buckets), dtype=torch.int64, device=decoder.embed.weight.device)
        for size in reversed(self._sizes):
            fits = attention.fill((), size)
            assert fits, size
            attend = attention.attend(size)
            self._graphs.add(size, lambda *given, attend=attend: decoder(*given, attend), tokens[:size], positions[:size])
        logger.info(
            "CUDA graphs: captured for %s tokens in %.1f s, %.0f MiB",
            ", ".join(map(str, self._sizes)),
            time.monotonic() - start,
            capture.allocated / 2**20,
        )

    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """tokens, positions: [tokens] int64, those of ``runs``. -> [tokens, hidden], valid until the next step is queued.

        None where no bucket fits.
        """
        size = next((size for size in self._sizes if size >= len(tokens)), None)
        if size is None or not self._attention.fill(segments, size):
            return None
        self.replayed += 1
        return self._graphs.replay(size, tokens, positions)[: len(tokens)]
