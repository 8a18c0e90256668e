"""Reads the safetensors files of a model directory, and checks their tensors against the expected ones. No pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from yardstick_llm.engine.models.files import ModelError, is_gguf, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUE_HEAD = "value_head.safetensors"
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


def read_headers(directory: Path) -> dict[str, Stored]:
    """Every tensor of a GGUF file, of ``model.safetensors`` or of the shards that the index names, by its name in a model with a
    head.

    Raises :class:`ModelError`.
    """
    if is_gguf(directory):
        from yardstick_llm.engine.models.gguf.config import stored_tensors  # which imports this module

        return stored_tensors(directory)
    if (directory / SINGLE).exists():
        return _with_prefix(read_header(directory / SINGLE))
    if not (directory / INDEX).exists():
        raise ModelError(
            f"The model directory has neither {SINGLE} nor {INDEX}; download the model again, or convert it to safetensors "
            "(pickled weights such as pytorch_model.bin are not read, because they can run code)."
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


def saved_without_head(stored: Mapping[str, Stored]) -> bool:
    """Whether a class without a head has saved the weights, as :func:`read_headers` gives them."""
    embedding = stored.get(BODY_PREFIX + EMBEDDING)
    return embedding is not None and embedding.name == EMBEDDING


def check(
    stored: Mapping[str, Stored], wanted: Mapping[str, Tensor], ignored: Iterable[str] = (), unread: tuple[str, ...] = ()
) -> None:
    """Raise :class:`ModelError` unless ``stored`` has exactly the wanted tensors, in their shapes and a known dtype.

    ``ignored`` may be stored or not, and so may names that begin as ``unread``, with or without :data:`BODY_PREFIX`.
    """
    if missing := [name for name in wanted if name not in stored]:
        raise ModelError(f"The weights lack {_some(missing)}; a file is incomplete or {_MISMATCH}.")
    known = {*wanted, *ignored}
    if extra := [
        found.name
        for name, found in stored.items()
        if name not in known and not name.endswith(_OBSOLETE_BUFFER) and not name.removeprefix(BODY_PREFIX).startswith(unread)
    ]:
        raise ModelError(f"The weights have {_some(extra)}, which the model has no place for; {_MISMATCH}.")
    for name, tensor in wanted.items():
        found = stored[name]
        if found.shape != tensor.shape:
            raise ModelError(
                f"Tensor {found.name} in {found.path.name} has shape {list(found.shape)}, not {list(tensor.shape)}; {_MISMATCH}."
            )
        if found.dtype not in _DTYPES and not is_gguf(found.path):
            raise ModelError(
                f"Tensor {found.name} in {found.path.name} is stored as {found.dtype}, which is not supported; "
                "use a checkpoint in float32, float16 or bfloat16."
            )


def copy(stored: Mapping[str, Stored], views: Mapping[str, Tensor], part: int = 0) -> None:
    """Fill each view with the tensor of its name, converted to the view's dtype, one tensor in memory at a time.

    Along an axis where a view is shorter than its tensor, it gets the ``part``-th stretch of its own length.
    """
    names_of: dict[Path, list[str]] = {}
    for name in views:
        names_of.setdefault(stored[name].path, []).append(name)
    for path, names in names_of.items():
        if is_gguf(path):
            from yardstick_llm.engine.models.gguf.file import copy_from  # which imports this module

            copy_from(path, [(stored[name], views[name]) for name in names], part)
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    view, source = views[name], stored[name]
                    if view.shape == source.shape:
                        view.copy_(file.get_tensor(source.name))
                    else:
                        view.copy_(file.get_slice(source.name)[stretches(view.shape, source.shape, part)])
        except (SafetensorError, OSError) as error:
            raise _damaged(path) from error


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that serving reads, in order of name."""
    if is_gguf(directory):
        from yardstick_llm.engine.models.gguf.file import read_gguf  # which imports this module

        return list(read_gguf(directory).parts)
    main = [directory / SINGLE] if (directory / SINGLE).exists() else _shards(directory)
    head = directory / VALUE_HEAD
    return sorted([*main, head] if head.exists() else main)


def _with_prefix(stored: dict[str, Stored]) -> dict[str, Stored]:
    """``stored`` with the names of published checkpoints: those of the parts of a model of text and images without
    :data:`BODY_PREFIX`, and with it where a class without a head has saved it."""
    if any(name.startswith(_NESTED) for name in stored):
        stored = {_unnested(name): tensor for name, tensor in stored.items()}
    if EMBEDDING not in stored or BODY_PREFIX + EMBEDDING in stored:
        return stored
    return {BODY_PREFIX + name if name.startswith(_BODY_PARTS) else name: tensor for name, tensor in stored.items()}


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
    """The ``part``-th stretch of its own length along each axis that is shorter than the whole."""
    axes = zip(lengths, whole, strict=True)
    return tuple(slice(None) if length == full else slice(part * length, (part + 1) * length) for length, full in axes)


def _some(names: list[str]) -> str:
    first = f"tensor {names[0]}"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _damaged(path: Path) -> ModelError:
    return ModelError(f"{path.name} is damaged or incomplete; download it again.")
