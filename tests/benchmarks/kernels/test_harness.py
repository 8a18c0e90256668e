"""The benchmarks of the kernels: what they say without a GPU, and what they print with one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.kernels.cli import BENCHMARKS
from benchmarks.kernels.harness import Gpu, Row
from benchmarks.kernels.operations import eager_thresholds
from yardstick_llm.kernels.keep_thresholds import keep_thresholds_reference

FITTING = (
    "candidates",
    "counted_linear",
    "label_logprobs",
    "largest",
    "lora",
    "paged_attention",
    "qk_norm_rope",
    "quantize",
    "residual",
    "rms_norm",
    "silu_mul",
    "weight_only",
)
"""Benchmarks whose references do not read the values of tensors, which have none here."""


class _Shapes(TorchFunctionMode):
    """Replaces allocations on a GPU by tensors with a shape and no content."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, args = kwargs or {}, tuple("meta" if isinstance(each, str) and each == "cuda" else each for each in args)
        return func(*args, **(kwargs | {"device": "meta"} if kwargs.get("device") == "cuda" else kwargs))


class _Counting(Gpu):
    """Runs each benchmark once and takes it for a second."""

    def moved(self, name: str, shape: str, bytes_moved: float, run: Callable[[], Any]) -> Row:
        run()
        return Row(name, shape, 1.0, bytes_moved, "GB/s", 1.0)

    def computed(self, name: str, shape: str, operations: float, run: Callable[[], Any]) -> Row:
        return self.moved(name, shape, operations, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_arguments_fit(name: str) -> None:
    """The references take what the benchmarks give them."""
    with _Shapes():
        rows = list(BENCHMARKS[name](_Counting("none", 4e12, 8e14)))
    assert len({(row.name, row.shape) for row in rows}) == len(rows)
    assert all(row.rate > 0 for row in rows)


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (50, 0.9)])
def test_the_peer_of_thresholds_finds_the_same(top_k: int, top_p: float) -> None:
    logits, ones = torch.randn(3, 500) * 3, torch.ones(3)
    keys, none = torch.full((3,), top_k), torch.full((3,), float("-inf"))
    expected = keep_thresholds_reference(logits, ones, keys, ones * top_p, none)
    torch.testing.assert_close(eager_thresholds(logits, top_k, top_p), expected)


@pytest.mark.gpu
def test_a_benchmark() -> None:
    command = [sys.executable, "-m", "benchmarks", "kernels", "rms_norm"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["gpu"]["bandwidth"] > 1e11
    assert all(0 < row["percent"] < 150 for row in report["rows"])
