"""Graphs of :class:`CudaCapture` stay valid on a GPU when another capture fails or another graph is destroyed."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runner.graphs import STREAMS, CudaCapture


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
