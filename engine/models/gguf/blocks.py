"""Tensors of GGUF files as codes with scales.

A row is a run of blocks, each with its scales and codes. Source of their layouts: ``ggml-common.h`` and ``ggml-quants.c`` of
https://github.com/ggml-org/ggml; ``gguf.quants`` has the same in numpy, which the tests compare with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from gguf.quants import IQ4_NL
from torch import Tensor

from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.coded import CHUNK, CodedWeight
from yardstick_llm.engine.models.gguf.file import GGUFTensor

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Blocks(NamedTuple):
    codes: Tensor
    """[blocks, numbers], int8 or uint8"""
    scales: Tensor
    """[blocks, groups] float32"""
    offsets: Tensor | None = None
    """Like ``scales``."""


def read_weight(tensor: GGUFTensor, heads: int = 0, plus_one: bool = False) -> CodedWeight | Tensor:
    """The weight, in the order of other checkpoints: codes, or a tensor of the dtype that the file has.

    ``heads``: heads whose rows the file has in another order: llama.cpp rotates neighbours, so element ``i`` of each half of a head
    is at ``2 i`` and ``2 i + 1``. 0 where rows are in order. ``plus_one``: the file has 1 + what other checkpoints store.
    Raises OSError.
    """
    order = None
    if heads:
        order = torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
    if (dtype := DENSE.get(tensor.kind)) is not None:
        values = _read(tensor, 0, 1 if len(tensor.shape) == 1 else tensor.shape[0]).view(dtype).view(tensor.shape)
        values = values if order is None else values[order]
        return values.float() - 1 if plus_one else values
    if len(tensor.shape) != 2:
        raise ModelError(f"is a vector in {tensor.kind}, which is not supported")
    return _coded(tensor, order)


def _coded(tensor: GGUFTensor, order: Tensor | None) -> CodedWeight:
    rows, columns = tensor.shape
    decode, bits, zero = _DECODERS[tensor.kind]
    parts: dict[str, Tensor] = {}
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        found = decode(_read(tensor, start, stop).view(-1, tensor.block_bytes))
        places = slice(start, stop) if order is None else torch.argsort(order)[start:stop]
        for name, part in found._asdict().items():
            if part is not None:
                part = part.reshape(stop - start, -1)
                parts.setdefault(name, torch.empty(rows, part.shape[1], dtype=part.dtype))[places] = part
    scales = parts["scales"]
    zeros = torch.full_like(scales, zero) if zero else None
    return CodedWeight(parts["codes"], scales, (1, columns // scales.shape[1]), zeros, parts.get("offsets"), bits=bits)


def _read(tensor: GGUFTensor, start: int, stop: int) -> Tensor:
    """[rows, bytes] of a matrix; a vector is one row."""
    raw = bytearray((stop - start) * tensor.row_bytes)
    view, done = memoryview(raw), 0
    with tensor.path.open("rb", buffering=0) as file:
        while done < len(raw):
            read = os.preadv(file.fileno(), [view[done:]], tensor.offset + start * tensor.row_bytes + done)
            if read == 0:
                raise OSError(f"{tensor.path.name} has become shorter")
            done += read
    return torch.frombuffer(raw, dtype=torch.uint8).view(stop - start, -1)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """[blocks, 1] float32 of the float16 at byte ``place``."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Codes of 4 bits: of each ``run`` bytes the lower halves, then the upper ones. [blocks, bytes] -> [blocks, 2 · bytes]"""
    runs = packed.reshape(len(packed), -1, run)
    return torch.stack([runs & 15, runs >> 4], 2).flatten(1)


def _fifth_bits(blocks: Tensor, place: int) -> Tensor:
    """16 or 0 for each of 32 numbers, from the bits of 4 bytes. -> [blocks, 32] uint8"""
    packed = blocks[:, place : place + 4].unsqueeze(2)
    return (((packed >> torch.arange(8, dtype=torch.uint8)) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> _Blocks:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return _Blocks(codes.view(torch.int8) - 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _iq4_nl(blocks: Tensor) -> _Blocks:
    return _Blocks(torch.tensor(IQ4_NL.kvalues, dtype=torch.int8)[_nibbles(blocks[:, 2:], 16).long()], _halves(blocks, 0))


def _group_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of 8 groups: two float16 and, from byte 4 on, 6 bits for each of them. -> [blocks, 8] each"""
    low, middle, high = torch.split(blocks[:, 4:16], 4, 1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    offsets = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return _halves(blocks, 0) * scales, -(_halves(blocks, 2) * offsets)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 16:], 32), *_group_scales(blocks))


def _q5_k(blocks: Tensor) -> _Blocks:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # [blocks, groups, 32]
    return _Blocks(_nibbles(blocks[:, 48:], 32) | fifth.flatten(1), *_group_scales(blocks))


def _q6_k(blocks: Tensor) -> _Blocks:
    low = _nibbles(blocks[:, :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # [blocks, halves, quarters, 32]
    codes = (low | (high.flatten(1) << 4)).view(torch.int8) - 32
    return _Blocks(codes, _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8))


_DECODERS: dict[str, tuple[Callable[[Tensor], _Blocks], int, int]] = {
    "Q8_0": (_q8_0, 8, 0),
    "Q4_0": (_q4_0, 4, 8),
    "Q4_1": (_q4_1, 4, 0),
    "Q5_0": (_q5_0, 8, 0),
    "Q5_1": (_q5_1, 8, 0),
    "Q4_K": (_q4_k, 4, 0),
    "Q5_K": (_q5_k, 8, 0),
    "Q6_K": (_q6_k, 8, 0),
    "IQ4_NL": (_iq4_nl, 8, 0),
}
"""Function, bits for :attr:`CodedWeight.bits`, and the code that stands for 0, of each type."""
