"""GPTQ and AWQ: 4 bits (GPTQ also 2 and 8) in 32-bit words, with a scale and a zero for each group of inputs and each output.

Both store the transpose of the weight. GPTQ packs it along the inputs and its zeros along the outputs; version 1 of its files
stores zeros less one. With ``desc_act``, ``g_idx`` has the group of each input. AutoGPTQ stores a bias of each projection: zeros
where the model has none. Sources: AutoGPTQ, ``qlinear_cuda.py``; GPTQModel, ``convert_gptq_v1_to_v2_format``. AWQ's layout ``gemm``
packs both along the outputs, in an order that suits its kernel. Source: AutoAWQ, ``packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Stored, StoredCodes, StoredZeros
from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight, unpack
from yardstick_llm.engine.models.formats.parts import FLOATS, Parts, block_side, with_weights

WORD = 32
GPTQ_BITS = (2, 4, 8)
AWQ_BITS = 4
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Nibble of a word that has each of 8 successive outputs."""


def gptq(stored: Mapping[str, Stored], keys: Keys) -> dict[str, Stored]:
    """``stored`` with weights in place of their parts. Raises :class:`ModelError`."""
    kind, known = keys.text("checkpoint_format", "gptq"), _known(keys)
    if kind not in ("gptq", "gptq_v2"):
        raise keys.error("checkpoint_format", f"is {kind!r:.40}, which is not supported; use a checkpoint in gptq or gptq_v2")

    def load(parts: Parts) -> CodedWeight:
        packed, scales = parts.tensor("qweight", torch.int32), parts.tensor("scales", *FLOATS)
        qzeros = parts.tensor("qzeros", torch.int32)
        bits = _gptq_bits(parts.stored)
        zeros = unpack(qzeros, bits, 1)
        zeros = (zeros + 1) & ((1 << bits) - 1) if kind == "gptq" else zeros
        codes = unpack(packed, bits, 0).t()
        width = block_side(codes.shape[1], len(scales), known)
        order = parts.tensor("g_idx", torch.int32, axes=1).long() if "g_idx" in parts else None
        if order is not None and torch.equal(order, torch.arange(codes.shape[1]) // width):
            order = None
        return CodedWeight(codes, scales.t().float(), (1, width), zeros.t().float(), groups=order, bits=8 if bits == 8 else 4)

    def shape(parts: Mapping[str, Stored]) -> tuple[int, ...]:
        rows, out = parts["qweight"].shape
        return out, rows * WORD // _gptq_bits(parts)

    found = with_weights(stored, "qweight", ("qzeros", "scales", "g_idx"), shape, load)
    biases = {name.removesuffix("weight") + "bias" for name, tensor in found.items() if isinstance(tensor, StoredCodes)}
    return found | {name: StoredZeros.of(found[name]) for name in biases & found.keys()}


def _gptq_bits(parts: Mapping[str, Stored]) -> int:
    """From the shapes, because some projections of a model may have other bits than its configuration says."""
    if "qzeros" not in parts or len(parts["qzeros"].shape) != 2 or len(parts["qweight"].shape) != 2:
        raise ValueError
    (_, words), (_, out) = parts["qzeros"].shape, parts["qweight"].shape
    bits = words * WORD // max(1, out)
    if bits not in GPTQ_BITS or words * WORD != bits * out:
        name = parts["qweight"].name
        raise ModelError(f"Tensor {name} has {words * WORD / max(1, out):.3g} bits; use a checkpoint in GPTQ of 2, 4 or 8 bits.")
    return bits


def awq(stored: Mapping[str, Stored], keys: Keys) -> dict[str, Stored]:
    """``stored`` with weights in place of their parts. Raises :class:`ModelError`."""
    version, known = keys.text("version", "gemm").lower(), _known(keys)
    if version != "gemm":
        raise keys.error("version", f"is {version!r:.40}, which is not supported; use a checkpoint in AWQ's layout gemm")

    def load(parts: Parts) -> CodedWeight:
        packed, scales = parts.tensor("qweight", torch.int32), parts.tensor("scales", *FLOATS)
        codes, zeros = (_awq_codes(each) for each in (packed, parts.tensor("qzeros", torch.int32)))
        width = block_side(len(codes), len(scales), known)
        return CodedWeight(codes.t().contiguous(), scales.t().float(), (1, width), zeros.t().float(), bits=AWQ_BITS)

    def shape(parts: Mapping[str, Stored]) -> tuple[int, ...]:
        rows, words = parts["qweight"].shape
        return words * WORD // AWQ_BITS, rows

    return with_weights(stored, "qweight", ("qzeros", "scales"), shape, load)


def _awq_codes(packed: Tensor) -> Tensor:
    """[rows, words] -> [rows, 8 · words] uint8"""
    codes = unpack(packed, AWQ_BITS, 1)
    return codes.view(len(codes), -1, len(AWQ_PLACES))[:, :, AWQ_PLACES].flatten(1)


def _known(keys: Keys) -> list[int]:
    """Inputs of a group, as the configuration says; nothing where a group has all of them (-1)."""
    return [] if keys.is_whole("group_size") else [keys.count("group_size")]
