"""Reads the headers of GGUF files: metadata, and where tensors are.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here and not by the reader
of the ``gguf`` library, which believes every count in a file, and makes an array of each string, which takes seconds. ``gguf``
knows the types and the sizes of their blocks.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

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
class GGUFTensor:
    """A tensor of a GGUF file."""

    path: Path
    name: str
    kind: str
    """One of :data:`TYPES`."""
    shape: tuple[int, ...]
    """As in torch: the axis whose numbers are neighbours is the last one."""
    offset: int
    """Place of its first byte in the file."""

    @property
    def block_bytes(self) -> int:
        return GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]][1]

    @property
    def row_bytes(self) -> int:
        """Bytes along the last axis."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return self.shape[-1] // block * size


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
    expected = metadata.get("split.count", 1) or 1  # llama-gguf-split --merge writes 0
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
        return GGUFTensor(self._path, name, known, tuple(lengths[::-1]), offset)

    def _placed(self, tensor: GGUFTensor, start: int) -> GGUFTensor:
        """``tensor`` with the offset from the start of the file, if it is all there."""
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
        if tensor.shape[-1] % block:
            raise self._wrong(f"has {tensor.name!r:.80} with rows of {tensor.shape[-1]}, which are no blocks of {block}")
        offset = start + tensor.offset
        if offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes > self._size:
            raise damaged(self._path)
        return dataclasses.replace(tensor, offset=offset)

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
