"""compressed-tensors, the format of LLM Compressor: integers of 4 or 8 bits, FP8, NVFP4 and MXFP4.

What each weight is follows from its tensors: ``weight_packed`` has signed integers, plus half of their range, in 32-bit words along
the inputs, or two codes of FP4 (e2m1) in each byte; ``weight`` has int8 or e4m3; ``weight_scale`` has a scale for the tensor, each
output, or each group or block. Scales of inputs, outputs, keys and values are not needed: activations are quantised with scales of
their own rows (``input_scale`` is a constant for all rows), and keys and values as :mod:`engine.models.formats.quantization` says.
Sparse weights, which leave zeros out, are not supported.
Source: compressed-tensors, ``compressors/quantized_compressors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Stored, StoredZeros, reading
from yardstick_llm.engine.models.files import Keys
from yardstick_llm.engine.models.formats.coded import CodedWeight, unpack
from yardstick_llm.engine.models.formats.parts import Parts, block_side, with_weights
from yardstick_llm.kernels.quantize import FP8

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
UNREAD = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
    ".q_scale", ".kv_scale", ".prob_scale", ".input_scale_ub", ".activation_scale",
)  # fmt: skip
"""Ends of the names of scales of activations."""
ZEROS = (".k_zero_point", ".v_zero_point")
"""Ends of the names of zero points of keys and values, which symmetric formats have none of."""
OTHERS = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale")
FP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
"""Twice the numbers that the codes of e2m1 stand for."""
WORD = 32


def compressed_tensors(stored: Mapping[str, Stored], keys: Keys) -> dict[str, Stored]:
    """``stored`` with weights in place of their parts. Raises :class:`ModelError`."""
    kind = keys.text("format", "dense")
    if kind not in FORMATS:
        raise keys.error("format", f"is {kind!r:.40}, which is not supported; use one of {', '.join(FORMATS)}")
    sparsity = keys.section("sparsity_config")
    if sparsity is not None and (sparse := sparsity.text("format", "dense")) != "dense":
        raise sparsity.error("format", f"is {sparse!r:.40}, which is not supported; use a checkpoint without sparse weights")
    if keys.section("transform_config") is not None:
        raise keys.error("transform_config", "asks for rotations of activations, which are not supported; use a checkpoint without")
    groups = _sections(keys.section("config_groups"))
    weights = [section for group in groups if (section := group.section("weights")) is not None]
    activations = any(group.section("input_activations") is not None for group in groups)
    widths = [
        section.count("group_size") for section in weights if section.present("group_size") and not section.is_whole("group_size")
    ]
    blocks = [section.ids("block_structure") for section in weights if section.present("block_structure")]
    heights = [block[0] for block in blocks if len(block) == 2]
    widths += [block[1] for block in blocks if len(block) == 2]

    def load(parts: Parts) -> CodedWeight:
        if "weight_packed" not in parts:
            return scaled(parts, "weight_scale", heights, widths, quantizes_input=activations)
        return _fp4(parts) if parts.stored["weight_packed"].dtype == "U8" else _packed(parts, widths)

    with reading() as read:

        def packed_shape(parts: Mapping[str, Stored]) -> tuple[int, ...]:
            rows, words = parts["weight_packed"].shape
            if parts["weight_packed"].dtype == "U8":
                return rows, 2 * words
            sizes = Parts(parts, read).tensor("weight_shape", torch.int64, torch.int32, axes=1).tolist()
            if len(sizes) != 2 or sizes[0] != rows or _bits(sizes[1], words) is None:
                raise ValueError
            return tuple(sizes)

        found = with_weights(stored, "weight_packed", OTHERS, packed_shape, load, dropped=UNREAD)
    found |= {name: StoredZeros.of(tensor) for name, tensor in found.items() if name.endswith(ZEROS)}
    return with_weights(found, "weight", OTHERS, lambda parts: parts["weight"].shape, load, beside="weight_scale")


def _sections(keys: Keys | None) -> list[Keys]:
    return [] if keys is None else keys.sections()


def scaled(
    parts: Parts, part: str, heights: Sequence[int] = (), widths: Sequence[int] = (), *, quantizes_input: bool
) -> CodedWeight:
    """A weight of int8 or e4m3 and its scales, named ``part``: one, one for each output, or one for each group or block.

    ``heights``, ``widths``: rows and columns of a block, as the configuration says.
    """
    codes, scales = parts.tensor("weight", torch.int8, FP8), parts.scales(part)
    zeros = parts.scales("weight_zero_point", torch.int8) if "weight_zero_point" in parts and codes.dtype == torch.int8 else None
    block = block_side(codes.shape[0], scales.shape[0], heights), block_side(codes.shape[1], scales.shape[1], widths)
    order = _order(parts, codes.shape[1], block[1])
    return CodedWeight(codes, scales, block, zeros, groups=order, quantizes_input=quantizes_input)


def _bits(columns: int, words: int) -> int | None:
    return next((bits for bits in (4, 8, 2) if columns > 0 and -(-columns // (WORD // bits)) == words), None)


def _packed(parts: Parts, widths: Sequence[int]) -> CodedWeight:
    packed, scales = parts.tensor("weight_packed", torch.int32), parts.scales("weight_scale")
    out, columns = parts.tensor("weight_shape", torch.int64, torch.int32, axes=1).tolist()
    bits = _bits(columns, packed.shape[1])
    assert bits is not None  # checked where the headers were read
    half = 1 << bits - 1
    zeros = torch.full_like(scales, half)
    if "weight_zero_point" in parts:
        given = parts.tensor("weight_zero_point", torch.int32, torch.int8)
        zeros = (unpack(given, bits, 0)[:out] if given.dtype == torch.int32 else given + half).float()
    block = block_side(out, scales.shape[0], ()), block_side(columns, scales.shape[1], widths)
    order = _order(parts, columns, block[1])
    codes = unpack(packed, bits, 1)[:, :columns]
    return CodedWeight(codes, scales, block, zeros, groups=order, bits=8 if bits == 8 else 4)


def _order(parts: Parts, columns: int, width: int) -> Tensor | None:
    """Group of each column; None where groups are side by side. Unused tables have -1 throughout."""
    if "weight_g_idx" not in parts:
        return None
    order = parts.tensor("weight_g_idx", torch.int32, torch.int64, axes=1).long()
    unused = bool((order == -1).all()) or torch.equal(order, torch.arange(columns) // width)
    return None if unused else order


def _fp4(parts: Parts) -> CodedWeight:
    """NVFP4: a scale in e4m3 for 16 columns, divided by one of the tensor. MXFP4: a power of two for 32 columns."""
    packed = parts.tensor("weight_packed", torch.uint8)
    codes = torch.tensor(FP4, dtype=torch.int8)[torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()]
    if "weight_global_scale" in parts:
        scales = parts.scales("weight_scale", FP8) / parts.scales("weight_global_scale")[0, 0]
    else:
        scales = torch.exp2(parts.tensor("weight_scale", torch.uint8).float() - 127)
    block = block_side(len(codes), scales.shape[0], ()), block_side(codes.shape[1], scales.shape[1], ())
    return CodedWeight(codes, scales / 2, block)
