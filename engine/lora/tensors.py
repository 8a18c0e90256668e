"""The safetensors format, read from memory: every bound is checked before a tensor is looked at.

The ``safetensors`` package copies all tensors at once under the interpreter's lock, which would stop the loop meanwhile; and a file
that is mapped ends the process if it is cut off while it is read. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from engine.lora.errors import AdapterError

FILE = "adapter_model.safetensors"
MAX_HEADER = 16 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH = struct.Struct("<Q")


class StoredTensor(NamedTuple):
    """A tensor of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte."""

    def view(self, data: bytearray) -> Tensor:
        """The tensor, not copied."""
        count = math.prod(self.shape)
        return torch.frombuffer(data, dtype=self.dtype, count=count, offset=self.begin).view(self.shape)


def read_header(data: bytearray, most: int) -> dict[str, StoredTensor]:
    """Read the tensors' places in the contents of a file of at most ``most`` tensors. Raises :class:`AdapterError`."""
    if len(data) < _LENGTH.size:
        raise _damaged()
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_HEADER or start > len(data):
        raise _damaged()
    try:
        header = json.loads(bytes(data[_LENGTH.size : start]))
    except (ValueError, RecursionError):
        raise _damaged() from None
    if not isinstance(header, dict):
        raise _damaged()
    header.pop("__metadata__", None)
    if len(header) > most:
        raise AdapterError(f"{FILE} has {len(header)} tensors, and at most {most} are read for this model.")
    return {name: _tensor(name, entry, start, len(data) - start) for name, entry in header.items()}


def _tensor(name: str, entry: Any, start: int, size: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged()
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= 4 and isinstance(dtype, str)):
        raise _damaged()
    if dtype not in _DTYPES:
        raise AdapterError(f"{name:.200} is {dtype:.20}; adapters in {', '.join(_DTYPES)} are supported.")
    kind, (begin, end) = _DTYPES[dtype], offsets
    numbers = math.prod(shape)
    if not (
        begin <= end <= size and numbers > 0 and end - begin == numbers * kind.itemsize and (start + begin) % kind.itemsize == 0
    ):
        raise _damaged()
    return StoredTensor(kind, tuple(shape), start + begin)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _damaged() -> AdapterError:
    return AdapterError(f"{FILE} is damaged or incomplete; copy the adapter again.")
