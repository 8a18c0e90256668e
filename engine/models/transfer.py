"""Memory of the device, and copies between host and device: one for the inputs of a step, one for its outputs. The host waits for
neither before it launches the next step.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU its pages come as they are first used, because writing gigabytes takes seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Copy:
    """One array of an :class:`Upload`, or one tensor of a :class:`Download`."""

    __slots__ = ("tensor",)

    tensor: Tensor
    """The tensor at its destination. Set by :meth:`Upload.send` and :meth:`Download.wait`."""


class Upload:
    """Integer arrays that travel to the device in one copy, from pinned memory where the device is a GPU."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self._copies: list[Copy] = []

    def add(self, values: Sequence[int] | npt.NDArray[np.integer]) -> Copy:
        """Add ``values``, flattened. The copy has its tensor, int64, after :meth:`send`."""
        self._parts.append(np.asarray(values, np.int64).reshape(-1))
        self._copies.append(Copy())
        return self._copies[-1]

    def send(self, device: torch.device) -> None:
        """Queue the copy of all arrays."""
        if not self._parts:
            return
        packed = torch.from_numpy(np.concatenate(self._parts))
        if device.type != "cpu":
            packed = packed.pin_memory().to(device, non_blocking=True)
        for copy, tensor in zip(self._copies, torch.split(packed, [len(part) for part in self._parts]), strict=True):
            copy.tensor = tensor


class Download:
    """Results that travel to the host in one copy.

    Each tensor is float32, or int64 with values that fit into 32 bits, so that all travel as one array of 32-bit words. On a GPU,
    :meth:`wait` blocks until the step is done even if it has no results, such as a part of a long prompt: buffers of the host that
    copies to the device still read are used again two steps later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sources: list[Tensor] = []
        self._copies: list[Copy] = []
        self._host = torch.empty(0, dtype=torch.int32)
        self._arrived: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Copy:
        """Add ``tensor``. The copy has its tensor, of the same shape and dtype on the host, after :meth:`wait`."""
        self._sources.append(tensor)
        self._copies.append(Copy())
        return self._copies[-1]

    def send(self) -> None:
        """Queue the copy of all tensors."""
        words = [_words(tensor) for tensor in self._sources]
        self._shapes = [tensor.shape for tensor in self._sources]
        self._dtypes = [tensor.dtype for tensor in self._sources]
        self._sources = []
        if words:
            self._host = torch.cat(words)
        if self._device.type == "cuda":
            if words:
                pinned = torch.empty(self._host.shape, dtype=torch.int32, pin_memory=True)
                self._device_words = self._host  # must live until the copy is done
                self._host = pinned.copy_(self._host, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> None:
        """Block until the work queued before :meth:`send` is done and the copy has arrived, and give each :class:`Copy` its tensor.
        Raises what the device raised."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = torch.split(self._host, [shape.numel() for shape in self._shapes])
        for copy, part, shape, dtype in zip(self._copies, parts, self._shapes, self._dtypes, strict=True):
            copy.tensor = (part.view(torch.float32) if dtype.is_floating_point else part.long()).view(shape)


def _words(tensor: Tensor) -> Tensor:
    """``tensor`` as 32-bit words, flattened."""
    return tensor.flatten().view(torch.int32) if tensor.is_floating_point() else tensor.flatten().int()
