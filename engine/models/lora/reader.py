"""Reads an adapter of PEFT's format from a directory. Everything is checked before memory is allocated for it.

The ``safetensors`` package copies all tensors at once under the interpreter's lock, which would stop the loop meanwhile; and a file
that is mapped ends the process if it is cut off while it is read. So the format is read here, from memory, and every bound is
checked before a tensor is looked at. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import MULTI_LABEL, REGRESSION
from yardstick_llm.engine.models.lora.config import CONFIG_FILE, MAX_BYTES, MODEL_FILE, AdapterConfig, AdapterError, parse
from yardstick_llm.engine.models.lora.slots import WHOLE, Layout, LoadedAdapter
from yardstick_llm.kernels.lora_layout import ALIGNMENT, padded_rank

WEIGHTS_FILE = "adapter_model.safetensors"
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
        raise AdapterError(f"{WEIGHTS_FILE} has {len(header)} tensors, and at most {most} are read for this model.")
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
    return AdapterError(f"{WEIGHTS_FILE} is damaged or incomplete; copy the adapter again.")


MAX_CLASSES = 4096
MOST_OTHERS = 1024
"""Tensors that no adapter of the model has, such as those of a vision tower; the first of them is refused by its name."""
_BODY = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"
"""Before the layers and the embedding; Qwen2.5-VL's has had several names."""
_NAME = re.compile(rf"(?:base_model\.model\.)?({_BODY}layers\.(\d{{1,4}})\.(.+))\.lora_([AB])(?:\.default)?\.weight")
_HEAD = re.compile(r"(?:base_model\.model\.)?score(?:\.modules_to_save(?:\.default)?)?\.weight")
_WHOLE = re.compile(rf"(?:base_model\.model\.)?{_BODY}({'|'.join(WHOLE)})(?:\.modules_to_save(?:\.default)?)?\.weight")

Table = npt.NDArray[np.int64]


class Pair(dict[str, StoredTensor]):
    """The matrices ``A`` and ``B`` of one projection."""

    def __init__(self, module: str) -> None:
        """``module``: name of the projection in the model that was trained, which patterns of the configuration match."""
        super().__init__()
        self.module = module


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters of one model."""

    layout: Layout
    info: wire.Info
    """Description of the base model."""
    dtype: torch.dtype
    max_rank: int
    pinned: bool = False
    """Whether weights lie in pinned memory."""
    modules: Sequence[str] = ()
    """Whole modules that adapters may bring."""

    @property
    def capacity(self) -> int:
        """Most numbers of :attr:`LoadedAdapter.weights`."""
        return capacity_of(self.layout, self.max_rank)

    @property
    def max_file(self) -> int:
        """Most bytes of a file of weights, which may be in float32."""
        rows = MAX_CLASSES + len(self.modules) * self.layout.vocab_size
        return 4 * (self.capacity + rows * self.layout.hidden_size) + MAX_HEADER

    def read(self, name: str, directory: Path) -> LoadedAdapter:
        """Read the adapter in ``directory``. Raises :class:`AdapterError`."""
        settings = read_bounded(directory, CONFIG_FILE, MAX_BYTES)
        parsed = parse(bytes(settings), self.modules)
        data = read_bounded(directory, WEIGHTS_FILE, self.max_file)
        model = read_bounded(directory, MODEL_FILE, MAX_BYTES, optional=True)
        stored = read_header(data, 2 * len(self.layout.places) + 1 + len(self.modules) + MOST_OTHERS)
        whole = self._take_modules(parsed, stored)
        pairs, head = self._sort(stored)
        self._check(parsed, pairs, head)
        if not (pairs or whole or head):
            raise AdapterError(f"{WEIGHTS_FILE} has no tensors; copy the adapter again.")
        digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in (settings, data, model))).hexdigest()[:32]
        table = self._table(pairs)
        weights = torch.zeros(int(self._numbers(table[1])), dtype=self.dtype, pin_memory=self.pinned)
        for place, pair in pairs.items():
            self._copy(pair, place, parsed.scale_of(pair.module), data, weights, table)
        own_head = None if head is None else self._copy_whole(head.view(data), torch.float32)
        modules = {name: self._copy_whole(tensor.view(data), self.dtype) for name, tensor in whole.items()}
        if not all(torch.isfinite(own).all() for own in (weights, *modules.values(), own_head) if own is not None):
            raise AdapterError("Weights are not finite in the model's number format; train the adapter again.")
        info = self._info(parsed, own_head, bytes(model))
        rank = max(pair["A"].shape[0] for pair in pairs.values()) if pairs else 0
        size = sum(own.nbytes for own in (weights, *modules.values(), own_head) if own is not None)
        described = wire.Adapter(name, digest, rank, size, info.capabilities, info.classes, info.multi_label)
        on_host = torch.from_numpy(table)
        places = on_host.pin_memory() if self.pinned else on_host
        return LoadedAdapter(described, info, weights, places, table[1], own_head, modules)

    def _take_modules(self, parsed: AdapterConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Remove the whole modules that the engine takes from ``stored``, and return them by their names."""
        found: dict[str, StoredTensor] = {}
        for name in list(stored):
            match = _WHOLE.fullmatch(name)
            if match is None or match[1] not in self.modules:
                continue
            module, tensor = match[1], stored.pop(name)
            if module in found:
                raise AdapterError(f"The tensor {name:.200} is stored twice; save the adapter again.")
            needed = self.layout.vocab_size, self.layout.hidden_size
            if tensor.shape != needed:
                shapes = f"{module} has shape {list(tensor.shape)}, where this model needs {list(needed)}"
                raise AdapterError(f"{shapes}; an adapter cannot change the vocabulary.")
            found[module] = tensor
        wanted = WHOLE if parsed.tied and self.layout.tied else parsed.modules
        if lacking := [name for name in wanted if name not in found]:
            raise AdapterError(f"modules_to_save names {lacking[0]}, which {WEIGHTS_FILE} lacks; copy the adapter again.")
        if "lm_head" in found and not self.layout.has_token_head:
            raise AdapterError("The adapter has an lm_head, and this model has no head for tokens.")
        return found

    def _copy_whole(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(weights.shape, dtype=dtype, pin_memory=self.pinned).copy_(weights)

    def _sort(self, stored: Mapping[str, StoredTensor]) -> tuple[dict[tuple[int, str], Pair], StoredTensor | None]:
        """Tensors by layer and projection, and the classification head."""
        pairs: dict[tuple[int, str], Pair] = {}
        head = None
        for name, tensor in stored.items():
            match = _NAME.fullmatch(name)
            if _HEAD.fullmatch(name):
                head = tensor
                continue
            place = (int(match[2]), match[3]) if match else None
            if match is None or place not in self.layout.places:
                raise AdapterError(f"The tensor {name:.200} is not supported: {_why_not(name, self.layout)}.")
            assert place is not None
            if match[4] in pairs.setdefault(place, Pair(match[1])):
                raise AdapterError(f"The tensor {name:.200} is stored twice; save the adapter again.")
            pairs[place][match[4]] = tensor
        return pairs, head

    def _check(self, parsed: AdapterConfig, pairs: dict[tuple[int, str], Pair], head: StoredTensor | None) -> None:
        """Raise :class:`AdapterError` where shapes or ranks do not fit."""
        for place, pair in pairs.items():
            index, number = self.layout.places[place]
            product, module = self.layout.products[index], pair.module
            rank = parsed.rank_of(module)
            if rank > self.max_rank:
                raise AdapterError(f"The rank of {module} is {rank}; this engine takes at most {self.max_rank} (--max-lora-rank).")
            for kind, shape in (("A", (rank, product.inputs)), ("B", (product.parts[number].outputs, rank))):
                if kind not in pair:
                    raise AdapterError(f"lora_{kind} of {module} is missing from {WEIGHTS_FILE}; copy the adapter again.")
                if pair[kind].shape != shape:
                    found = list(pair[kind].shape)
                    raise AdapterError(f"lora_{kind} of {module} has shape {found}, where this model needs {list(shape)}.")
        stored = {module.rpartition(".")[2] for _, module in pairs}
        if lacking := [name for name in parsed.targets if name not in stored]:
            raise AdapterError(f"target_modules names {lacking[0]}, which {WEIGHTS_FILE} lacks; copy the adapter again.")
        if head is not None and (len(head.shape) != 2 or head.shape[1] != self.layout.hidden_size or head.shape[0] > MAX_CLASSES):
            needed = f"[classes, {self.layout.hidden_size}] with at most {MAX_CLASSES} classes"
            raise AdapterError(f"The classification head has shape {list(head.shape)}, where {needed} is needed.")
        if parsed.task == "SEQ_CLS" and head is None and not self.info.classes:
            raise AdapterError("task_type is SEQ_CLS, and neither the adapter nor the model has a classification head (score).")

    def _table(self, pairs: Mapping[tuple[int, str], Pair]) -> Table:
        """[2, products]: begin and rank of each product's matrices, as they are kept."""
        ranks = [0] * len(self.layout.products)
        for place, pair in pairs.items():
            index = self.layout.places[place][0]
            ranks[index] = max(ranks[index], padded_rank(pair["A"].shape[0]))
        return places_of(self.layout, ranks)

    def _numbers(self, ranks: Table) -> int:
        return sum(_aligned(product.numbers(int(rank))) for product, rank in zip(self.layout.products, ranks, strict=True))

    def _copy(
        self,
        pair: Pair,
        place: tuple[int, str],
        scale: float,
        data: bytearray,
        weights: Tensor,
        table: Table,
    ) -> None:
        """Copy one projection to its place in ``weights``."""
        index, number = self.layout.places[place]
        product = self.layout.products[index]
        begin, rank = table[:, index].tolist()
        own = pair["A"].shape[0]
        behind = begin + len(product.parts) * rank * product.inputs
        a = weights[begin:behind].view(len(product.parts), rank, product.inputs)
        b = weights[behind : behind + product.outputs * rank].view(product.outputs, rank)
        first = sum(part.outputs for part in product.parts[:number])
        a[number, :own] = pair["A"].view(data)
        b[first : first + product.parts[number].outputs, :own] = pair["B"].view(data).float() * scale

    def _info(self, parsed: AdapterConfig, head: Tensor | None, model: bytes) -> wire.Info:
        """Description of the model for requests with this adapter."""
        if head is None and parsed.task != "SEQ_CLS":
            return self.info
        able = [name for name in self.info.capabilities if name == "embed"]
        names, problem = _classes(model)
        count = len(self.info.classes) if head is None else len(head)
        if len(names) != count:
            names = list(self.info.classes) if len(self.info.classes) == count else [f"LABEL_{index}" for index in range(count)]
        kind = {"multi_label": problem == MULTI_LABEL, "regression": problem == REGRESSION}
        if not problem and names == list(self.info.classes):
            kind = {"multi_label": self.info.multi_label, "regression": self.info.regression}
        return msgspec.structs.replace(self.info, capabilities=["classify", *able], classes=names, **kind)


def capacity_of(layout: Layout, rank: int) -> int:
    """Numbers of an adapter of this rank on all projections."""
    return sum(_aligned(product.numbers(padded_rank(rank))) for product in layout.products)


def places_of(layout: Layout, ranks: Sequence[int]) -> Table:
    """:attr:`LoadedAdapter.table` of an adapter with these ranks as they are kept, [products]."""
    sizes = [_aligned(product.numbers(rank)) for product, rank in zip(layout.products, ranks, strict=True)]
    return np.array([np.cumsum([0, *sizes[:-1]]), ranks], np.int64)


def read_bounded(directory: Path, name: str, most: int, *, optional: bool = False) -> bytearray:
    """Read a regular file of at most ``most`` bytes; an optional file may be absent. Raises :class:`AdapterError`."""
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if optional and isinstance(error, FileNotFoundError):
            return bytearray()
        raise AdapterError(
            f"{name} cannot be opened ({error.strerror}); give a directory of an adapter in PEFT's format."
        ) from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AdapterError(f"{name} is no regular file.")
        if found.st_size > most:
            raise AdapterError(f"{name} has {found.st_size:,} bytes; an adapter of this engine has at most {most:,}.")
        data = bytearray(found.st_size)
        view, read = memoryview(data), 0
        while read < len(data) and (count := file.readinto(view[read:])):
            read += count
        if read < len(data):
            raise AdapterError(f"{name} changed while it was read; load the adapter again.")
    return data


def _classes(model: bytes) -> tuple[list[str], str]:
    """Names of classes in a ``config.json`` beside the adapter, and its ``problem_type``; nothing if it has none."""

    class Model(msgspec.Struct):
        id2label: dict[int, str] = {}
        problem_type: str | None = None

    try:
        found = msgspec.json.decode(model, type=Model)
    except (msgspec.DecodeError, RecursionError):
        return [], ""
    names = [found.id2label.get(index, "") for index in range(len(found.id2label))]
    return names if all(names) else [], found.problem_type or ""


def _why_not(name: str, layout: Layout) -> str:
    for part, reason in (
        ("visual.", "adapters of the vision tower must be merged into the model"),
        ("lora_magnitude_vector", "it belongs to DoRA"),
        ("lm_head.weight", "an engine takes an lm_head that is started with --lora-modules lm_head"),
        ("embed_tokens.weight", "an engine takes embed_tokens that is started with --lora-modules all"),
        ("lm_head", "adapters of the head for tokens (lm_head) must be merged into the model"),
        ("embed_tokens", "adapters of embeddings (embed_tokens) must be merged into the model"),
        ("lora_embedding", "adapters of embeddings must be merged into the model"),
        ("expert", "adapters of experts must be merged into the model"),
        ("router", "adapters of experts must be merged into the model"),
        (".bias", "trained biases must be merged into the model"),
    ):
        if part in name:
            return reason
    match = _NAME.fullmatch(name)
    if match and int(match[2]) >= layout.layers:
        return f"this model has {layout.layers} layers"
    if match and match[3].startswith("self_attn."):
        return "adapters of this model's queries, keys and values, whose rows are reordered, must be merged into the model"
    return "this model has no such projection"


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


BLANK = "warm-up"


def blank_adapter(layout: Layout, info: wire.Info, dtype: torch.dtype, *, pinned: bool = False) -> LoadedAdapter:
    """Return an adapter of rank 1; kernels take the rank at run time, so others need no compilation. ``pinned``: see
    :attr:`engine.models.lora.reader.AdapterReader.pinned`."""
    weights = torch.zeros(capacity_of(layout, 1), dtype=dtype, pin_memory=pinned)
    table = places_of(layout, [padded_rank(1)] * len(layout.products))
    on_host = torch.from_numpy(table)
    description = wire.Adapter(BLANK, BLANK, 1, weights.nbytes, info.capabilities, info.classes, info.multi_label)
    return LoadedAdapter(description, info, weights, on_host.pin_memory() if pinned else on_host, table[1], None)
