"""Weights as published files store them: codes, and what they stand for. Every format of files is read into this form.

Execution knows three kinds only: dense weights, 8 bits with scales, and 4 bits with scales of groups. :meth:`CodedWeight.fill`
makes the first of any format, a few rows at a time; :mod:`engine.models.formats.stored` chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.kernels.quantize import FP8

CODES = (torch.int8, torch.uint8, FP8)
CHUNK = 1 << 20
"""Elements that are made dense at a time: 4 MiB of float32."""


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [out, in]. Element [o, i] is ``(codes - zeros) · scales + offsets``, where a block of it has a scale, a zero and an
    offset in common. Raises :class:`ModelError` where the parts do not fit together."""

    codes: Tensor
    """[out, in], one of :data:`CODES`. Those of 4 bits are 0 to 15 in uint8, so that they can be packed."""
    scales: Tensor
    """[blocks of rows, blocks of columns] float32"""
    block: tuple[int, int]
    """Rows and columns of a block; the last ones may be cut off. Group scales have one row, scales of channels all columns."""
    zeros: Tensor | None = None
    """Codes that stand for 0, like :attr:`scales`, float32; None for 0."""
    offsets: Tensor | None = None
    """Like :attr:`scales`; None for 0."""
    groups: Tensor | None = None
    """[in] int64: block of columns of each column, where columns of a block are not side by side; otherwise None."""
    bits: int = 8
    """4 or 8; other formats of at most 8 bits count as 8."""
    quantizes_input: bool = False
    """Whether the format also wants activations in 8 bits."""

    def __post_init__(self) -> None:
        (rows, columns), (height, width) = self.codes.shape, self.block
        wanted = -(-rows // height), -(-columns // width)
        if self.groups is not None:
            wanted = wanted[0], self.scales.shape[-1]
        if self.codes.dtype not in CODES:
            raise ModelError(f"has codes of {self.codes.dtype}, which are not known")
        for name, found in (("scales", self.scales), ("zeros", self.zeros), ("offsets", self.offsets)):
            if found is not None and found.shape != wanted:
                raise ModelError(f"has {name} of shape {list(found.shape)}, where {list(wanted)} is expected")
        if self.groups is not None and (
            self.groups.shape != (columns,) or int(self.groups.min()) < 0 or int(self.groups.max()) >= wanted[1]
        ):
            raise ModelError(f"has an order of columns that is not one of {columns} columns in {wanted[1]} groups")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]"""
        weight = torch.empty(self.shape, dtype=dtype)
        self.fill(weight)
        return weight

    def fill(self, weight: Tensor) -> None:
        """Copy the matrix to ``weight``, [out, in], rounded to its dtype."""
        step = max(1, CHUNK // self.shape[1])
        for start in range(0, self.shape[0], step):
            weight[start : start + step].copy_(self._dense(slice(start, start + step)))

    def by_row(self) -> CodedWeight:
        """The same matrix with blocks of one row."""
        if self.block[0] == 1:
            return self
        owners = torch.arange(self.shape[0]) // self.block[0]
        spread: dict[str, Any] = {name: None if part is None else part[owners] for name, part in self._parts().items()}
        return dataclasses.replace(self, block=(1, self.block[1]), **spread)

    def cut(self, rows: slice, columns: slice) -> CodedWeight | None:
        """A part of the matrix; None where its columns begin or end within a block."""
        (top, bottom, _), (start, stop, _) = (each.indices(size) for each, size in zip((rows, columns), self.shape, strict=True))
        weight = self if top % self.block[0] == 0 and (bottom % self.block[0] == 0 or bottom == self.shape[0]) else self.by_row()
        (height, width), (_, in_all) = weight.block, self.shape
        of_rows, of_columns, groups = slice(top // height, -(-bottom // height)), slice(None), weight.groups
        if groups is not None:
            groups = groups[start:stop]
        elif weight.scales.shape[1] == 1:
            width = width if stop - start == in_all else stop - start
        elif start % width or (stop % width and stop != in_all):
            return None
        else:
            of_columns = slice(start // width, -(-stop // width))
        parts: dict[str, Any] = {
            name: None if part is None else part[of_rows, of_columns].contiguous() for name, part in weight._parts().items()
        }
        codes = weight.codes[top:bottom, start:stop].contiguous()
        return dataclasses.replace(weight, codes=codes, block=(height, width), groups=groups, **parts)

    def _dense(self, rows: slice) -> Tensor:
        """[rows, in] float32"""
        weight = self.codes[rows].float()
        owners = torch.arange(self.shape[0])[rows] // self.block[0]
        width = self.block[1]
        blocked = self.groups is None and self.shape[1] % width == 0
        shaped = weight.view(len(weight), -1, width) if blocked else weight

        def spread(part: Tensor) -> Tensor:
            if blocked:
                return part[owners].unsqueeze(2)
            return part[owners][:, torch.arange(self.shape[1]) // width if self.groups is None else self.groups]

        if self.zeros is not None:
            shaped -= spread(self.zeros)
        shaped *= spread(self.scales)
        if self.offsets is not None:
            shaped += spread(self.offsets)
        return weight

    def _parts(self) -> dict[str, Tensor | None]:
        return {"scales": self.scales, "zeros": self.zeros, "offsets": self.offsets}


def stack(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """One matrix of the rows of several, one below the other; None where their formats have nothing in common."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(weight.block[0] != first.block[0] or weight.shape[0] % weight.block[0] for weight in weights):
        weights = [weight.by_row() for weight in weights]
        first = weights[0]
    alike = all(
        (weight.codes.dtype, weight.block, weight.bits, weight.quantizes_input)
        == (first.codes.dtype, first.block, first.bits, first.quantizes_input)
        and (weight.groups is None) == (first.groups is None)
        and (weight.groups is None or first.groups is None or torch.equal(weight.groups, first.groups))
        for weight in weights
    )
    if not alike:
        weights = _levelled(weights)
        if not weights:
            return None
        first = weights[0]
    joined: dict[str, Any] = {}
    for name in ("scales", "zeros", "offsets"):
        parts = [weight._parts()[name] for weight in weights]
        given = [torch.zeros_like(weight.scales) if part is None else part for weight, part in zip(weights, parts, strict=True)]
        joined[name] = None if all(part is None for part in parts) else torch.cat(given)
    return dataclasses.replace(first, codes=torch.cat([weight.codes for weight in weights]), **joined)


def _levelled(weights: Sequence[CodedWeight]) -> list[CodedWeight]:
    """Convert matrices of different formats to int8 without zeros, with groups of the narrowest width. Return an empty list if one
    of them cannot be converted. GGUF files often have values in more bits than queries and keys."""
    width = min(weight.block[1] for weight in weights)
    level = []
    for weight in weights:
        whole = weight.block[0] == 1 and weight.groups is None and weight.shape[1] % weight.block[1] == 0 == weight.block[1] % width
        if not whole or weight.quantizes_input or weight.codes.dtype == FP8 or int(weight.codes.max()) > 127:
            return []
        parts = {
            name: None if part is None else part.repeat_interleave(weight.block[1] // width, 1)
            for name, part in weight._parts().items()
        }
        scales, zeros, offsets = (parts[name] for name in ("scales", "zeros", "offsets"))
        assert scales is not None
        if zeros is not None:
            offsets = (0 if offsets is None else offsets) - zeros * scales
        level.append(CodedWeight(weight.codes.to(torch.int8), scales, (1, width), offsets=offsets))
    return level


def unpack(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Codes of ``bits`` (2, 4 or 8), packed along ``axis`` (0 or 1) in 32-bit words, the first in the lowest bits. packed:
    [rows, columns] int32. -> uint8, with 32 / bits times as many rows or columns."""
    if axis == 0:
        return unpack(packed.t().contiguous(), bits, 1).t()
    codes = packed.contiguous().view(torch.uint8)  # little-endian, as all supported processors are
    if bits == 8:
        return codes
    parts = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, 2).flatten(1)
