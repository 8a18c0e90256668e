"""Tensors of which published files make one weight: found by the ends of their names, read and checked by their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Read, Stored, StoredCodes
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Parts:
    """The tensors of one weight by the ends of their names, such as ``scales``."""

    stored: Mapping[str, Stored]
    read: Read

    def __contains__(self, part: str) -> bool:
        return part in self.stored

    def tensor(self, part: str, *dtypes: torch.dtype, axes: int = 2) -> Tensor:
        """Read a tensor of one of ``dtypes``. Raises :class:`ModelError` where it is missing or another."""
        if part not in self.stored:
            raise ModelError(f"has no {part} beside it")
        found = self.read(self.stored[part])
        if found.dtype not in dtypes or found.ndim != axes or found.numel() == 0:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ModelError(
                f"has {part} of {found.dtype} and shape {list(found.shape)}, where {axes} axes of {names} are expected"
            )
        return found

    def scales(self, part: str, *dtypes: torch.dtype) -> Tensor:
        """Read scales of a tensor, of channels or of groups or blocks. -> two axes, float32"""
        stored = self.stored.get(part)
        found = self.tensor(part, *(dtypes or FLOATS), axes=2 if stored is None else len(stored.shape)).float()
        if found.ndim > 2:
            raise ModelError(f"has {part} of shape {list(found.shape)}, where two axes are expected")
        return found.view(-1, 1) if found.ndim < 2 else found


def with_weights(
    stored: Mapping[str, Stored],
    mark: str,
    others: Iterable[str],
    shape: Callable[[Mapping[str, Stored]], tuple[int, ...]],
    load: Callable[[Parts], CodedWeight | Tensor],
    *,
    beside: str = "",
    dropped: tuple[str, ...] = (),
) -> dict[str, Stored]:
    """``stored`` with a weight ``X.weight`` in place of each ``X.`` + ``mark`` and the ``others`` beside it.

    ``shape``: of a weight, from the headers of its parts. It raises ValueError where they do not fit together. ``load``: makes the
    weight. ``beside``: one of the others, without which the mark is no code. ``dropped``: ends of the names of tensors that are not
    needed.
    """
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(dropped)} if dropped else dict(stored)
    for name in [name for name in kept if name.endswith("." + mark)]:
        base = name.removesuffix(mark)
        if beside and base + beside not in kept:
            continue
        found = {part: kept.pop(base + part) for part in (mark, *others) if base + part in kept}
        marked = found[mark]
        try:
            size = shape(found)
        except ValueError:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in found.items())
            raise ModelError(
                f"The parts of tensor {marked.name} in {marked.path.name} do not fit together ({shapes}); download the model again."
            ) from None

        def parts_of(read: Read, found: Mapping[str, Stored] = found) -> CodedWeight | Tensor:
            return load(Parts(found, read))

        kept[base + "weight"] = StoredCodes(marked.path, size, marked.dtype, marked.name, parts_of)
    return kept


def block_side(size: int, count: int, known: Iterable[int]) -> int:
    """Rows or columns of each of ``count`` blocks of ``size``: one of ``known``, or equal parts. Raises :class:`ModelError`."""
    for side in known:
        if side > 0 and -(-size // side) == count:
            return side
    if count < 1 or size % count:
        raise ModelError(f"has {count} scales for {size} rows or columns, which do not fit")
    return size // count
