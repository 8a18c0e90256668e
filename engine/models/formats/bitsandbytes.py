"""bitsandbytes: 4 bits with a table of 16 numbers (nf4, fp4) and a scale for each block of the flattened weight, and int8 with a
scale for each output. Weights are made dense where they are read, but for int8.

The scales of 4 bits may be codes themselves. A file of JSON in a tensor of bytes has shape and block sizes. Source: bitsandbytes,
``functional.py`` (``QuantState``, ``dequantize_4bit``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Stored, reading
from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.formats.parts import Parts, with_weights

STATES = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
OTHERS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)
MOST_STATE = 1 << 16
"""Bytes of the JSON."""
INT8 = 127.0


def bitsandbytes(stored: Mapping[str, Stored], keys: Keys) -> dict[str, Stored]:  # noqa: ARG001 (the files say everything)
    """``stored`` with weights in place of their parts. Raises :class:`ModelError`."""
    with reading() as read:

        def shape(parts: Mapping[str, Stored]) -> tuple[int, ...]:
            sizes = _state(Parts(parts, read)).get("shape")
            if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError
            if -(-math.prod(sizes) // 2) != math.prod(parts["weight"].shape):
                raise ValueError
            return tuple(sizes)

        found = with_weights(stored, "weight", OTHERS, shape, _dense, beside="weight.absmax")
    return with_weights(
        found, "weight", ("SCB",), lambda parts: parts["weight"].shape, _int8, beside="SCB", dropped=(".weight_format",)
    )


def _state(parts: Parts) -> dict[str, Any]:
    name = next((name for name in STATES if name in parts), STATES[0])
    if name in parts and math.prod(parts.stored[name].shape) > MOST_STATE:
        raise ModelError(f"has a {name} of more than {MOST_STATE} bytes")
    try:
        state = json.loads(bytes(parts.tensor(name, torch.uint8, axes=1).tolist()))
    except (ValueError, RecursionError):
        raise ModelError(f"has a {name} that is not JSON") from None
    if not isinstance(state, dict):
        raise ModelError(f"has a {name} that is not JSON")
    return state


def _dense(parts: Parts) -> Tensor:
    """[out, in] float32"""
    state = _state(parts)
    table = parts.tensor("weight.quant_map", torch.float32, axes=1)
    packed = parts.tensor("weight", torch.uint8, axes=len(parts.stored["weight"].shape)).flatten()
    if len(table) != 16:
        raise ModelError(f"has a quant_map of {len(table)} numbers, where 16 are expected")
    rows, columns = state["shape"]  # checked where the headers were read
    weight = table[torch.stack([packed >> 4, packed & 15], 1).flatten().long()][: rows * columns]
    return _scale(weight, _scales(parts, state), state.get("blocksize")).view(rows, columns)


def _scales(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """A scale for each block of the weight, float32."""
    scales = parts.tensor("weight.absmax", torch.float32, torch.uint8, axes=1)
    if scales.dtype == torch.float32:
        return scales
    table, nested = (parts.tensor(f"weight.nested_{part}", torch.float32, axes=1) for part in ("quant_map", "absmax"))
    offset = state.get("nested_offset")
    if len(table) != 256 or not isinstance(offset, int | float):
        raise ModelError("has scales of 8 bits without a table of 256 numbers or without an offset")
    return _scale(table[scales.long()], nested, state.get("nested_blocksize")) + float(offset)


def _scale(numbers: Tensor, scales: Tensor, size: object) -> Tensor:
    """``numbers``, each times the scale of its block of ``size``."""
    if not isinstance(size, int) or size < 1 or -(-len(numbers) // size) != len(scales):
        raise ModelError(f"has {len(scales)} scales for {len(numbers)} numbers in blocks of {size!r:.40}")
    return numbers * scales.repeat_interleave(size)[: len(numbers)]


def _int8(parts: Parts) -> CodedWeight:
    codes, scales = parts.tensor("weight", torch.int8), parts.scales("SCB")
    return CodedWeight(codes, scales / INT8, (1, codes.shape[1]))
