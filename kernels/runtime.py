"""Triton where it can run: on a GPU, or in its interpreter (``TRITON_INTERPRET=1``, for tests without a GPU).

Elsewhere stand-ins let the kernels' modules be imported, so that a CPU needs no Triton and starts without it. The module also has
the checks that every launcher makes first: whether a kernel may take these tensors, and whether shapes and types are the expected
ones.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on tensors of the CPU."""

AVAILABLE = INTERPRETED or torch.cuda.is_available()

HAS_LOOPS = find_spec("numba") is not None
"""Whether numba is installed, which compiles :mod:`kernels.native`; hosts of GPUs may be without it."""
NOTHING = np.empty(0, np.float32)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that kernels read and write; they compute in float32."""


class Kernel(Protocol):
    """Type of a function that :func:`jit` returns."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The function that launches it over ``grid``; an empty grid launches nothing."""
        ...

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Part of another kernel."""
        ...


class _Absent:
    """Takes the place of a module that is not needed here: each attribute is itself, and a call gives back what it decorates."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self


if AVAILABLE:
    import triton
    import triton.language as tl
else:
    triton = tl = _Absent()


def jit(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """``triton.jit``, with types. ``varying``: the integers that change from call to call, for which nothing is compiled again."""
    return triton.jit(do_not_specialize=list(varying))  # type: ignore[no-any-return, unused-ignore]


def launches(*tensors: Tensor | None) -> bool:
    """Whether a kernel accepts these tensors: all are on a GPU, and none needs a gradient, which no kernel computes."""
    return all(tensor is None or tensor.is_cuda for tensor in tensors) and not needs_gradient(*tensors)


def compiles(*tensors: Tensor | None) -> bool:
    """Whether the loops of :mod:`kernels.native` accept these tensors: on a CPU, in float32, and none needs a gradient."""
    if not HAS_LOOPS:
        return False
    for each in tensors:  # a generator would take longer than the rest of it
        if each is not None and (each.dtype != torch.float32 or not each.is_cpu):
            return False
    return not needs_gradient(*tensors)


@functools.cache
def loops() -> Any:
    """:mod:`kernels.native`, imported where it is first needed: Numba takes a quarter of a second.

    Numba takes only a folder that it can write to, so the loops that an image has (``YARDSTICK_LOOPS``) are copied to its folder.
    """
    given, kept = os.environ.get("YARDSTICK_LOOPS"), os.environ.get("NUMBA_CACHE_DIR")
    if given and kept:
        with suppress(OSError):  # they are there, or are compiled
            shutil.copytree(given, kept, dirs_exist_ok=False)
    return importlib.import_module("yardstick_llm.kernels.native")


def prepare_loops(weight: Tensor) -> bool:
    """Load the loops if a model with this ``weight`` computes with them, so that its first step does not wait for them. -> whether
    it does."""
    if found := compiles(weight.detach()):
        loops()
    return found


def flat(tensor: Tensor | None) -> npt.NDArray[Any]:
    """The numbers of a tensor on a CPU, as loops take them; a copy if it is not contiguous. None: an empty array of float32."""
    return NOTHING if tensor is None else tensor.numpy(force=True).reshape(-1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd follows what is computed of these tensors, so that nothing may be computed in place."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least ``size``: the size of a block that covers it."""
    return 1 << (size - 1).bit_length()


def warps(elements: int) -> int:
    """Return the number of warps of a program over ``elements`` elements: eight per thread, a load of 16 bytes in 16-bit dtypes."""
    return min(32, max(1, power_of_two(elements) // 256))


def expect_device(name: str, tensor: Tensor) -> None:
    """A kernel can reach the tensor from the current device. Raises ValueError otherwise."""
    if tensor.is_cuda:
        if tensor.device.index != torch.cuda.current_device():
            raise ValueError(f"{name} is on {tensor.device}, and the current device is cuda:{torch.cuda.current_device()}")
    elif not (INTERPRETED and tensor.device.type == "cpu"):
        raise ValueError(f"Triton's kernels run on an NVIDIA GPU, and {name} is on {tensor.device}: use the reference")


def expect(
    name: str, tensor: Tensor, like: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], dense_axes: int | None = None
) -> None:
    """The tensor has this shape and one of these dtypes, lies where ``like`` lies, and is contiguous.

    ``dense_axes``: how many of its last axes must be contiguous together; all of them unless given. Raises ValueError otherwise.
    """
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, where {list(shape)} is expected")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, where {' or '.join(map(str, dtypes))} is expected")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, where {like.device} is expected")
    if not tensor.is_contiguous() and (dense_axes is None or not _is_dense(tensor, dense_axes)):
        raise ValueError(f"{name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}: make it contiguous")


def _is_dense(tensor: Tensor, axes: int) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape[-axes:]), reversed(tensor.stride()[-axes:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


__all__ = [
    "AVAILABLE",
    "FLOATS",
    "HAS_LOOPS",
    "INTERPRETED",
    "Kernel",
    "compiles",
    "expect",
    "expect_device",
    "flat",
    "jit",
    "launches",
    "loops",
    "needs_gradient",
    "power_of_two",
    "prepare_loops",
    "tl",
    "triton",
    "warps",
]
