"""Graphs of :class:`CudaCapture` stay valid when another capture fails or another graph is destroyed.

Without a GPU, the real ``torch.cuda.graph`` captures nothing on stand-ins for streams and graphs, which do what those of torch
do: streams are handed out in turn, and a graph that is destroyed frees cuBLAS's workspace for the stream of its capture.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from engine.runner.graphs import STREAMS, CudaCapture

GPU = torch.device("cuda", 0)


class FakeStream(int):
    """A stream, by its number; 0 is the default one."""

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeCuda:
    """CUDA's streams, and cuBLAS's workspaces."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = FakeStream(0)
        self.workspaces: set[int] = set()
        self.breaks = False
        """Whether captures end with an error."""
        self.leaves_pool = True
        """Whether a capture also ends the allocation to its pool then."""
        self.pools: set[object] = set()
        """Those to which memory is allocated."""
        turn = itertools.count()
        graph = type("Graph", (FakeGraph,), {"cuda": self})
        for name, value in {
            "Stream": lambda device: FakeStream(1 + next(turn) % STREAMS),
            "stream": lambda stream: FakeContext(self, stream),
            "current_stream": lambda device=None: self.current,
            "synchronize": lambda: None,
            "empty_cache": self.empty_cache,
            "current_device": lambda: 0,
            "graph_pool_handle": object,
            "mem_get_info": lambda device: (0, 0),
            "CUDAGraph": graph,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.end(pool), raising=False)

    def empty_cache(self) -> None:
        if self.pools:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end(self, pool: object) -> None:
        """End the allocation to ``pool``."""
        if pool not in self.pools:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools.remove(pool)

    def product(self) -> Tensor:
        """Work that needs the workspace."""
        self.workspaces.add(self.current)
        return torch.zeros(1)


class FakeContext:
    """``torch.cuda.stream``."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self.cuda, self.stream = cuda, stream

    def __enter__(self) -> None:
        self.before, self.cuda.current = self.cuda.current, self.stream

    def __exit__(self, *error: object) -> None:
        self.cuda.current = self.before


class FakeGraph:
    """``torch.cuda.CUDAGraph``."""

    cuda: FakeCuda
    ended = False

    def capture_begin(self, pool: object, **named: Any) -> None:
        self.stream, self.pool = self.cuda.current, pool
        self.cuda.pools.add(pool)

    def capture_end(self) -> None:
        if not self.cuda.breaks or self.cuda.leaves_pool:
            self.cuda.end(self.pool)
        if self.cuda.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.ended = True

    def replay(self) -> None:
        assert self.stream in self.cuda.workspaces, "the workspace belongs to other tensors now"

    def __del__(self) -> None:
        if self.ended:
            self.cuda.workspaces.discard(self.stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(CudaCapture, "_living", WeakSet())
    return FakeCuda(monkeypatch)


def failing(work: Any) -> Any:
    """``work`` that fails when it is captured, which is the second time that it runs."""
    runs = itertools.count()

    def run() -> Tensor:
        output = work()
        if next(runs):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("error", ["of Python", "of CUDA"])
@torch.inference_mode()
def test_graphs_outlive_failed_captures_on_a_gpu(error: str, device: torch.device) -> None:
    """Split products, which need the workspace, also after other captures on all streams are gone, and then a new capture."""
    generator = torch.Generator(device).manual_seed(1)
    left, right = (torch.randn(size, device=device, generator=generator).bfloat16() for size in ((8, 16384), (16384, 64)))
    expected = (left @ right).float()
    capture, before = CudaCapture(device), torch.cuda.current_stream(device)
    captured = capture(lambda: left @ right)

    def waits() -> Tensor:
        product = left @ right
        if torch.cuda.is_current_stream_capturing() and error == "of CUDA":
            product.sum().item()
        return product

    with pytest.raises(RuntimeError):
        capture(failing(waits))
    assert torch.cuda.current_stream(device) == before
    for _ in range(STREAMS):
        CudaCapture(device)(lambda: left @ right)
    gc.collect()
    torch.cuda.synchronize(device)
    memory = [torch.full((1 << 20,), 7.0, device=device) for _ in range(64)]
    captured.output.fill_(float("nan"))
    captured.replay()
    torch.testing.assert_close(captured.output.float(), expected, atol=2.0, rtol=2e-2)
    assert all(bool((each == 7.0).all()) for each in memory)
    again = CudaCapture(device)(lambda: left @ right)
    again.replay()
    torch.testing.assert_close(again.output.float(), expected, atol=2.0, rtol=2e-2)
