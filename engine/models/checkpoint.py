"""Reads the weights of a model directory, and checks their tensors against the expected ones.

They are safetensors files or, for encoders, many of which are published only so, ``pytorch_model.bin``. Of a pickle, torch's
restricted reader takes tensors and containers alone (``weights_only``); the size of what it reads is bounded before.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from yardstick_llm.engine.models.files import ModelError, read_json
from yardstick_llm.engine.models.formats.coded import CodedWeight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_SUFFIXES = "pytorch_model.bin", (".bin", ".pt")
MAX_PICKLED_BYTES, MAX_PICKLE_BYTES = 16 << 30, 64 << 20
"""Most bytes of a file with pickled weights, and of the pickle in it, which names its tensors."""
VALUE_HEAD = "value_head.safetensors"
ADAPTER = "lenvm_adapter.safetensors"
"""A length model's additions to the model that it is served with, in place of weights of its own."""
EMBEDDING = "embed_tokens.weight"
BODY_PREFIX = "model."
"""Before the names of all tensors that are no head's, except in weights that a class without a head has saved."""
_BODY_PARTS = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")
_NESTED = ("model.language_model.", "model.visual.", "language_model.")
"""Parts of models of text and images, as releases of transformers from 4.52 on name them, and as Gemma 3 is published."""
_DTYPES = {"F32", "F16", "BF16"}
_OBSOLETE_BUFFER = "rotary_emb.inv_freq"
"""Stored by old exporters; recomputed here."""
_MISMATCH = "the config.json beside them may belong to another model"


@dataclass(frozen=True)
class Stored:
    """A tensor on disk."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """In safetensors' spelling: F32, BF16, ..."""
    name: str
    """Name in the file."""


class Read(Protocol):
    """A function that reads tensors."""

    def __call__(self, stored: Stored, at: tuple[slice, ...] | EllipsisType = ..., /) -> Tensor:
        """The stretch ``at`` of a tensor; all of it unless given."""


@dataclass(frozen=True)
class StoredCodes(Stored):
    """A weight that a file stores as codes, or in another layout. Shape and name are those of the weight, and dtype names the
    format."""

    load: Callable[[Read], CodedWeight | Tensor]
    """Reads the weight's parts. Raises :class:`ModelError` whose text continues "Tensor X in FILE ..." where they do not fit."""


@dataclass(frozen=True)
class StoredZeros(Stored):
    """A tensor that a model without a place for it may leave out if all its numbers are 0."""

    @classmethod
    def of(cls, tensor: Stored) -> StoredZeros:
        return cls(tensor.path, tensor.shape, tensor.dtype, tensor.name)


def read_codes(stored: StoredCodes, read: Read) -> CodedWeight | Tensor:
    """The weight: codes, or a dense matrix. Raises :class:`ModelError`."""
    try:
        found = stored.load(read)
    except ModelError as error:
        raise ModelError(f"Tensor {stored.name} in {stored.path.name} {error}; download the model again.") from None
    if found.shape != stored.shape:
        raise ModelError(
            f"Tensor {stored.name} in {stored.path.name} has shape {list(found.shape)}, not {list(stored.shape)}; {_MISMATCH}."
        )
    return found


@contextmanager
def reading() -> Iterator[Read]:
    """A function that reads tensors, whose files stay open until the end. It raises SafetensorError or OSError for damaged ones."""
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def read(stored: Stored, at: tuple[slice, ...] | EllipsisType = ..., /) -> Tensor:
            file = files.get(stored.path)
            if file is None and stored.path.suffix in PICKLED_SUFFIXES:
                file = files[stored.path] = read_pickled(stored.path)
            elif file is None:
                file = files[stored.path] = stack.enter_context(safe_open(stored.path, framework="pt"))
            if isinstance(file, dict):
                tensor: Tensor = file[stored.name]
                return tensor[at]
            return file.get_tensor(stored.name) if at is ... else file.get_slice(stored.name)[at]  # type: ignore[no-any-return]

        yield read


def read_headers(directory: Path, *, pickled: bool = False) -> dict[str, Stored]:
    """Every tensor of ``model.safetensors`` or of the shards that the index names, by its name in a model with a head.

    ``pickled``: also of ``pytorch_model.bin``, where there is none of these. Raises :class:`ModelError`.
    """
    if (directory / SINGLE).exists():
        return _with_prefix(read_header(directory / SINGLE))
    if pickled and (directory / PICKLED).exists() and not (directory / INDEX).exists():
        return read_pickled_header(directory / PICKLED)
    if not (directory / INDEX).exists():
        raise ModelError(
            f"The model directory has neither {SINGLE} nor {INDEX}; download the model again, or convert it to safetensors "
            "(of a decoder, pickled weights such as pytorch_model.bin are not read)."
        )
    stored: dict[str, Stored] = {}
    for shard in _shards(directory):
        stored |= read_header(shard)
    return _with_prefix(stored)


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of one file. Raises :class:`ModelError` where the file is absent, damaged or cut short."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 (no mapping)
            return {name: Stored(path, tuple(part.get_shape()), part.get_dtype(), name) for name, part in slices}
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing from the model directory; download the model again.") from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path) from error


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Every tensor of a pickled file, mapped into memory. Raises :class:`ModelError` where it is absent, damaged, too large, of
    torch's format before release 1.6, or has anything but tensors by name."""
    try:
        if path.stat().st_size > MAX_PICKLED_BYTES:
            raise ModelError(f"{path.name} has more than {MAX_PICKLED_BYTES >> 30} GiB; convert it to safetensors.")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl")) > MAX_PICKLE_BYTES:
            raise ModelError(f"The pickle in {path.name} has more than {MAX_PICKLE_BYTES >> 20} MiB; convert it to safetensors.")
        if any(entry.compress_type for entry in entries):
            raise _damaged(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing from the model directory; download the model again.") from None
    except zipfile.BadZipFile:
        raise ModelError(f"{path.name} is damaged, or older than torch 1.6; download or convert it again.") from None
    except pickle.UnpicklingError as error:
        raise ModelError(f"{path.name} has more than tensors, which is not read; convert it to safetensors.") from error
    except (RuntimeError, OSError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) and _is_plain(value) for key, value in found.items()):
        raise ModelError(f"{path.name} is not a table of tensors by name; convert it to safetensors.")
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def read_pickled_header(path: Path) -> dict[str, Stored]:
    """Every tensor of a pickled file. Raises :class:`ModelError`."""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    tensors = read_pickled(path)
    return {name: Stored(path, tuple(each.shape), kinds.get(each.dtype, str(each.dtype)), name) for name, each in tensors.items()}


def saved_without_head(stored: Mapping[str, Stored]) -> bool:
    """Whether a class without a head has saved the weights, as :func:`read_headers` gives them."""
    embedding = stored.get(BODY_PREFIX + EMBEDDING)
    return embedding is not None and embedding.name == EMBEDDING


def check(
    stored: Mapping[str, Stored], wanted: Mapping[str, Tensor], ignored: Iterable[str] = (), unread: tuple[str, ...] = ()
) -> None:
    """Raise :class:`ModelError` unless ``stored`` has exactly the wanted tensors, in their shapes and a known dtype.

    ``ignored`` may be stored or not, and so may names that begin as ``unread``, with or without :data:`BODY_PREFIX`, and
    :class:`StoredZeros` that are zeros.
    """
    if missing := [name for name in wanted if name not in stored]:
        raise ModelError(f"The weights lack {_some(missing)}; a file is incomplete or {_MISMATCH}.")
    known = {*wanted, *ignored}
    extra = {
        name: found
        for name, found in stored.items()
        if name not in known and not name.endswith(_OBSOLETE_BUFFER) and not name.removeprefix(BODY_PREFIX).startswith(unread)
    }
    if others := [found.name for found in extra.values() if not isinstance(found, StoredZeros)]:
        raise ModelError(f"The weights have {_some(others)}, which the model has no place for; {_MISMATCH}.")
    for name, read in _in_files(stored, extra):
        if read(found := stored[name]).float().any():
            raise ModelError(
                f"Tensor {found.name} in {found.path.name} is not all zeros, and the model has no place for it; {_MISMATCH}, or "
                "its format is not supported."
            )
    for name, tensor in wanted.items():
        found = stored[name]
        if found.shape != tensor.shape:
            raise ModelError(
                f"Tensor {found.name} in {found.path.name} has shape {list(found.shape)}, not {list(tensor.shape)}; {_MISMATCH}."
            )
        if found.dtype not in _DTYPES and not isinstance(found, StoredCodes):
            raise ModelError(
                f"Tensor {found.name} in {found.path.name} is stored as {found.dtype}, which is not supported; "
                "use a checkpoint in float32, float16 or bfloat16."
            )


def copy(stored: Mapping[str, Stored], views: Mapping[str, Tensor], part: int = 0) -> None:
    """Fill each view with the tensor of its name, converted to the view's dtype, one tensor in memory at a time.

    Along an axis where a view is shorter than its tensor, it gets the ``part``-th stretch of its own length.
    """
    for name, read in _in_files(stored, views):
        view, source = views[name], stored[name]
        at = ... if view.shape == source.shape else stretches(view.shape, source.shape, part)
        found = read_codes(source, read) if isinstance(source, StoredCodes) else read(source, at)
        if isinstance(found, CodedWeight) and at is ...:
            found.fill(view)
        else:
            dense = found.dequantize() if isinstance(found, CodedWeight) else found
            view.copy_(dense[at] if isinstance(source, StoredCodes) else dense)


def read_all_codes(stored: Mapping[str, Stored], names: Iterable[str]) -> dict[str, CodedWeight]:
    """Those of the named weights that are stored as codes. Raises :class:`ModelError`."""
    found = {}
    for name, read in _in_files(stored, names):
        source = stored[name]
        weight = read_codes(source, read) if isinstance(source, StoredCodes) else None
        if isinstance(weight, CodedWeight):
            found[name] = weight
    return found


def _in_files(stored: Mapping[str, Stored], names: Iterable[str]) -> Iterator[tuple[str, Read]]:
    """The names, file by file, and what reads their tensors. Raises :class:`ModelError` for a file that is damaged."""
    names_of: dict[Path, list[str]] = {}
    for name in names:
        names_of.setdefault(stored[name].path, []).append(name)
    for path, inside in names_of.items():
        try:
            with reading() as read:
                yield from ((name, read) for name in inside)
        except (SafetensorError, OSError) as error:
            raise _damaged(path) from error


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that serving reads, in order of name."""
    singles = [directory / name for name in (SINGLE, PICKLED, ADAPTER) if (directory / name).exists()]
    main = singles[:1] if singles and not (directory / INDEX).exists() else _shards(directory)
    head = directory / VALUE_HEAD
    return sorted([*main, head] if head.exists() else main)


def _with_prefix(stored: dict[str, Stored]) -> dict[str, Stored]:
    """``stored`` with the names of published checkpoints: those of the parts of a model of text and images without
    :data:`BODY_PREFIX`, and with it where a class without a head has saved it."""
    glm = any(name.endswith(".post_self_attn_layernorm.weight") for name in stored)
    stored = {_plain(name, _GLM_NORMS if glm else {}): tensor for name, tensor in stored.items()}
    if any(name.startswith(_NESTED) for name in stored):
        stored = {_unnested(name): tensor for name, tensor in stored.items()}
    if EMBEDDING not in stored or BODY_PREFIX + EMBEDDING in stored:
        return stored
    return {BODY_PREFIX + name if name.startswith(_BODY_PARTS) else name: tensor for name, tensor in stored.items()}


_GLM_NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Norms of GLM-4-0414, and their names in Gemma 2."""


def _plain(name: str, norms: Mapping[str, str]) -> str:
    """``name`` with the names of Phi-3's feed-forward layers in Granite 4, and with those of ``norms``."""
    module, _, kind = name.rpartition(".")
    before, dot, norm = module.rpartition(".")
    name = f"{before}{dot}{norms[norm]}.{kind}" if norm in norms else name
    return name.replace("shared_mlp.input_linear", "mlp.gate_up_proj").replace("shared_mlp.output_linear", "mlp.down_proj")


def _unnested(name: str) -> str:
    """``model.language_model.X`` is ``model.X``, and ``model.visual.X`` is ``visual.X``; the same without ``model.``."""
    inner = name.removeprefix(BODY_PREFIX)
    if inner.startswith("language_model."):
        part = inner.removeprefix("language_model.").removeprefix(BODY_PREFIX)
        return part if part.startswith("lm_head.") else BODY_PREFIX + part
    return inner if inner.startswith("visual.") else name


def _shards(directory: Path) -> list[Path]:
    names = read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{INDEX} has no weight_map from tensors to files; download the model again.")
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise ModelError(f"{INDEX} names a file outside the model directory ({outside[0]!r:.80}); download the model again.")
    return [directory / name for name in sorted(set(names.values()))]


def stretches(lengths: Iterable[int], whole: Iterable[int], part: int) -> tuple[slice, ...]:
    """The ``part``-th stretch of a view's length along each axis where its tensor is longer."""
    axes = zip(lengths, whole, strict=True)
    return tuple(slice(None) if length == full else slice(part * length, (part + 1) * length) for length, full in axes)


def _some(names: list[str]) -> str:
    first = f"tensor {names[0]}"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _damaged(path: Path) -> ModelError:
    return ModelError(f"{path.name} is damaged or incomplete; download it again.")
