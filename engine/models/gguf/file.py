"""Reads GGUF files: metadata, and tensors, which are dequantised where they are copied.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here and not by the reader
of the ``gguf`` library, which believes every count in a file, and makes an array of each string, which takes seconds. ``gguf``
knows the types of tensors and dequantises them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Stored, stretches
from yardstick_llm.engine.models.files import ModelError

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""Supported types of tensors."""
MAX_HEADER = 256 << 20
"""Bytes of metadata and tensor descriptions. Those of a vocabulary of 260,000 tokens take 12 MB."""
MAX_ENTRIES = 1 << 16
"""Keys, and tensors. The largest published models have some 1,200 tensors."""
MAX_STRINGS = 1 << 21
"""Strings of one array."""
MAX_ELEMENTS = 1 << 40
"""Elements of a tensor along one axis."""
CHUNK = 1 << 22
"""Numbers that are dequantised at a time, where rows can be read by themselves."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GGUFTensor(Stored):
    """A tensor of a GGUF file."""

    offset: int
    """Of its first byte in the file."""
    heads: int = 0
    """Heads whose rows the file has in another order: a pair that is rotated together is adjacent. 0 where rows are in order."""
    plus_one: bool = False
    """The file has 1 + what other checkpoints store."""

    @property
    def kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.dtype]


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a model, of one file or of all its parts."""

    path: Path
    """The first part."""
    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Numbers, strings, and lists of them."""
    tensors: Mapping[str, GGUFTensor]
    """By their names in the file."""


def read_gguf(path: Path) -> GGUFFile:
    """The header of a model. ``path``: its file, or any of its parts (``-00001-of-00003.gguf``).

    Raises :class:`ModelError` for a damaged file, an unknown version or type, and counts and sizes that the file cannot have.
    """
    split = _PART.fullmatch(path.name)
    if split is None:
        parts: tuple[Path, ...] = (path,)
    else:
        count = int(split["count"])
        if not 1 <= count <= MAX_ENTRIES:
            raise ModelError(f"{path.name} is one of {count} parts, which cannot be; download the model again.")
        parts = tuple(path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    try:
        marks = tuple((part.stat().st_mtime_ns, part.stat().st_size) for part in parts)
    except OSError as error:
        missing = next(part for part in parts if not part.is_file())
        raise ModelError(f"{missing.name} is missing beside {path.name}; download all parts of the model.") from error
    return _read(parts, marks)


@lru_cache(2)
def _read(parts: tuple[Path, ...], marks: tuple[tuple[int, int], ...]) -> GGUFFile:
    """``marks``: time of change and size of each part, so that a changed file is read again."""
    headers = [_read_header(part, size) for part, (_, size) in zip(parts, marks, strict=True)]
    metadata = headers[0][0]
    expected = metadata.get("split.count", 1)
    if expected != len(parts):
        raise ModelError(
            f"{parts[0].name} is the first of {expected} parts, and its name says {len(parts)}; keep the names of the parts, which"
            " end in -00001-of-0000N.gguf."
        )
    tensors: dict[str, GGUFTensor] = {}
    for part, (_, found) in zip(parts, headers, strict=True):
        if twice := tensors.keys() & found.keys():
            raise ModelError(f"{part.name} has tensor {twice.pop()} again, which another part has; download the model again.")
        tensors |= found
    return GGUFFile(parts[0], parts, metadata, tensors)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), min(size, MAX_HEADER), access=mmap.ACCESS_READ) as data:
            return _Header(path, size, data).read()
    except (OSError, ValueError, struct.error) as error:  # a file of no bytes, text that is not UTF-8, and an end in the header
        raise damaged(path) from error


class _Header:
    """A cursor in the header of one file. Each count is checked against the bytes that are left before anything is allocated."""

    def __init__(self, path: Path, size: int, data: mmap.mmap) -> None:
        self._path, self._size, self._data = path, size, data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self._path.name} is no GGUF file; download it again.")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(
                f"{self._path.name} has version {version} of GGUF, or is for big-endian machines; use one of version 3."
            )
        tensors, keys = self._count("tensors"), self._count("keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise self._wrong(f"has {key!r:.80} twice")
            metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._wrong(f"has general.alignment {alignment!r:.80}")
        start = math.ceil(self._at / alignment) * alignment
        placed = {tensor.name: self._placed(tensor, start) for tensor in found}
        if len(placed) != len(found):
            raise self._wrong("has two tensors of one name")
        return metadata, placed

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return _shortest(self._number(self._format(kind)), kind)

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            if count > min(MAX_STRINGS, (len(self._data) - self._at) // 8):
                raise self._wrong(f"has an array of {count} strings")
            return [self._string() for _ in range(count)]
        form = self._format(kind)
        if count > (len(self._data) - self._at) // struct.calcsize(f"<{form}"):
            raise self._wrong(f"has an array of {count} numbers")
        values = struct.unpack_from(f"<{count}{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{form}")
        return list(values)

    def _format(self, kind: int) -> str:
        form = _SCALARS.get(GGUFValueType(kind)) if kind in GGUFValueType.__members__.values() else None
        if form is None:
            raise self._wrong(f"has a value of type {kind}")
        return form

    def _tensor(self) -> GGUFTensor:
        name = self._string()
        axes = self._number("I")
        if not 1 <= axes <= 4:
            raise self._wrong(f"has {name!r:.80} with {axes} axes")
        lengths = [self._number("Q") for _ in range(axes)]
        if not all(1 <= length <= MAX_ELEMENTS for length in lengths):
            raise self._wrong(f"has {name!r:.80} of shape {lengths[::-1]}")
        kind, offset = self._number("I"), self._number("Q")
        known = GGMLQuantizationType(kind).name if kind in GGMLQuantizationType.__members__.values() else f"type {kind}"
        if known not in TYPES:
            raise ModelError(
                f"Tensor {name:.80} in {self._path.name} is stored as {known}, which is not supported; use a file with"
                f" {', '.join(TYPES)}."
            )
        return GGUFTensor(self._path, tuple(lengths[::-1]), known, name, offset)

    def _placed(self, tensor: GGUFTensor, start: int) -> GGUFTensor:
        """``tensor`` with the offset from the start of the file, if it is all there."""
        block, _ = GGML_QUANT_SIZES[tensor.kind]
        if tensor.shape[-1] % block:
            raise self._wrong(f"has {tensor.name!r:.80} with rows of {tensor.shape[-1]}, which are no blocks of {block}")
        offset = start + tensor.offset
        if offset + math.prod(tensor.shape[:-1]) * row_bytes(tensor) > self._size:
            raise damaged(self._path)
        return GGUFTensor(tensor.path, tensor.shape, tensor.dtype, tensor.name, offset)

    def _count(self, things: str) -> int:
        count = self._number("Q")
        if count > MAX_ENTRIES:
            raise self._wrong(f"has {count} {things}")
        return int(count)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise damaged(self._path)
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _wrong(self, problem: str) -> ModelError:
        return ModelError(f"{self._path.name} {problem}, which cannot be; download it again.")


def _shortest(value: Any, kind: int) -> Any:
    """``value``; a float32 as the shortest decimal number that it stands for, such as 1e-5."""
    return float(str(np.float32(value))) if kind == GGUFValueType.FLOAT32 else value


def damaged(path: Path) -> ModelError:
    return ModelError(f"{path.name} is damaged or incomplete; download it again.")


def row_bytes(tensor: GGUFTensor) -> int:
    """Bytes along the last axis."""
    block, size = GGML_QUANT_SIZES[tensor.kind]
    return tensor.shape[-1] // block * size


def copy_from(path: Path, pairs: Iterable[tuple[Stored, Tensor]], part: int = 0) -> None:
    """Fill each view with its tensor of the file ``path``, as :func:`engine.models.checkpoint.copy` does.

    :data:`CHUNK` numbers or a projection into heads are in memory at a time.
    """
    try:
        with path.open("rb", buffering=0) as file:
            for tensor, view in pairs:
                assert isinstance(tensor, GGUFTensor)
                _fill(file, tensor, view, part)
    except OSError as error:
        raise damaged(path) from error


def read_values(tensor: GGUFTensor) -> Tensor:
    """All of a small tensor, in float32. Raises :class:`ModelError`."""
    values = torch.empty(tensor.shape)
    copy_from(tensor.path, [(tensor, values)])
    return values


def _fill(file: BinaryIO, tensor: GGUFTensor, view: Tensor, part: int) -> None:
    rows, *others = stretches(view.shape, tensor.shape, part)
    first, last, _ = rows.indices(tensor.shape[0])
    in_one = tensor.heads or len(tensor.shape) == 1
    step = last - first if in_one else max(1, CHUNK // math.prod(tensor.shape[1:]))
    for start in range(first, last, step):
        stop = min(start + step, last)
        values = torch.from_numpy(_values(file, tensor, start, stop))
        view[start - first : stop - first].copy_(values[(slice(None), *others)])


def _values(file: BinaryIO, tensor: GGUFTensor, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Rows ``start`` to ``stop``, in the order of other checkpoints, in float32."""
    order = _order(tensor)
    if len(tensor.shape) == 1:
        values = _dequantized(_read_rows(file, tensor, 0, 1), tensor).reshape(-1)[order][start:stop]
    else:
        wanted = np.arange(tensor.shape[0])[order][start:stop]
        lowest = int(wanted.min())
        raw = _read_rows(file, tensor, lowest, int(wanted.max()) + 1)
        values = _dequantized(raw[wanted - lowest], tensor)
    return values - 1 if tensor.plus_one else np.ascontiguousarray(values)


def _order(tensor: GGUFTensor) -> Any:
    """Index of the rows of a tensor in the order of other checkpoints.

    llama.cpp rotates neighbours, so its files have element ``i`` of each half of a head at ``2 i`` and ``2 i + 1``.
    """
    if not tensor.heads:
        return slice(None)
    rows = np.arange(tensor.shape[0]).reshape(tensor.heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _read_rows(file: BinaryIO, tensor: GGUFTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """[rows, bytes] of a matrix; a vector is one row."""
    length = row_bytes(tensor)
    raw = bytearray((stop - start) * length)
    view, done = memoryview(raw), 0
    while done < len(raw):
        read = os.preadv(file.fileno(), [view[done:]], tensor.offset + start * length + done)
        if read == 0:
            raise damaged(tensor.path)
        done += read
    return np.frombuffer(raw, np.uint8).reshape(-1, length)


def _dequantized(raw: npt.NDArray[np.uint8], tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """[rows, bytes] -> [rows, numbers]"""
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; what it makes is not a number
        return dequantize(raw, tensor.kind)
