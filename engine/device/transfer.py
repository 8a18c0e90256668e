"""Host arrays to the device in one copy, and results back in one copy that nobody waits for before the next step is launched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Upload:
    """Collects integer arrays; :meth:`send` copies them all at once, from pinned memory where there is a device to copy to."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []

    def add(self, values: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Returns the place of ``values`` in what :meth:`send` returns."""
        self._parts.append(np.asarray(values, np.int64).reshape(-1))
        return len(self._parts) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        """One int64 tensor an array, in the order added."""
        packed = torch.from_numpy(np.concatenate(self._parts))
        if device.type != "cpu":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return list(torch.split(packed, [len(part) for part in self._parts]))


class Download:
    """Results on their way to the host.

    Every tensor is float32 or int64 with values that fit into 32 bits, so that all travel as one run of 32-bit words.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        words = [tensor.flatten().view(torch.int32) if tensor.is_floating_point() else tensor.flatten().int() for tensor in tensors]
        self._host = torch.cat(words) if words else torch.empty(0, dtype=torch.int32)
        self._arrived: torch.cuda.Event | None = None
        if self._host.is_cuda:
            pinned = torch.empty(self._host.shape, dtype=torch.int32, pin_memory=True)
            self._device_words = self._host  # kept until the copy is done
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, as they were."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = torch.split(self._host, [shape.numel() for shape in self._shapes])
        return [
            (part.view(torch.float32) if dtype.is_floating_point else part.long()).view(shape)
            for part, shape, dtype in zip(parts, self._shapes, self._dtypes, strict=True)
        ]
