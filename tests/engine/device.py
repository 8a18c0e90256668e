"""Helpers of tests on a GPU: a check that the host waits for nothing, and FlashInfer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from yardstick_llm.engine.runner.attention import flashinfer


@contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU: what would wait for it raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def skip_without_flashinfer(device: torch.device, head_dim: int, dtype: torch.dtype, kept: torch.dtype | None = None) -> None:
    """Skip the test where FlashInfer cannot run, or could after some minutes of compiling."""
    if reason := flashinfer.problem(device, head_dim, dtype, kept or dtype):
        pytest.skip(f"FlashInfer: {reason}")
    if not flashinfer.compiled(head_dim, dtype, kept or dtype):
        pytest.skip(f"FlashInfer: its module for {dtype} and heads of {head_dim} is not compiled, and tests do not compile it")
