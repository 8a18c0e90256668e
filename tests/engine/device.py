"""A device that notices when the host waits for it: on a CPU, whoever looks at values that a GPU would have to finish first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from yardstick_llm.engine.runner.attention import flashinfer

T = TypeVar("T")


class Device(TorchDispatchMode):
    """Stands for a GPU: what would wait for one raises, but within :meth:`kernel`, whose work there is a launch."""

    waiting: ClassVar = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
    methods: ClassVar = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.in_kernel = False
        for name in self.methods:
            patch.setattr(torch.Tensor, name, self.guarded(name, getattr(torch.Tensor, name)))

    def guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            assert self.in_kernel, f"{name} waits for the device"
            return method(*arguments, **named)

        return call

    def kernel(self, operation: Callable[..., T]) -> Callable[..., T]:
        def launch(*arguments: Any) -> T:
            self.in_kernel = True
            try:
                return operation(*arguments)
            finally:
                self.in_kernel = False

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith(("index", "_index")) and any(
            isinstance(places, (list, tuple)) and any(at is not None and at.dtype == torch.bool for at in places)
            for places in args[1:2]
        )
        assert self.in_kernel or not (masks or name in self.waiting), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


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
