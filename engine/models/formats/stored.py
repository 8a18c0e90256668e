"""A decoder whose projections multiply with the codes of a quantised checkpoint, where the device has a product for them.

The kinds of execution, by the device and what a weight's codes are:

- 8 bits with scales: int8 for rows, whose format quantises activations, on a CPU (:mod:`kernels.int8`); FP8 for rows
  (:mod:`kernels.quantize`) and for blocks (:mod:`kernels.block_scaled`) on a GPU that multiplies it. Activations get scales of
  their own for each token, or each token's part of a block.
- 4 bits, and 8 bits where activations stay as they are (:mod:`kernels.weight_only`), on a GPU, and on a CPU where memory matters
  more than time.
- dense: whatever is left, such as projections that the checkpoint did not quantise.

Experts have the same kinds, but for FP8 in blocks, whose activations stay as they are too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from yardstick_llm.engine.models.decoder import MLP, DecoderLayer
from yardstick_llm.engine.models.formats import fp8, int8, packed
from yardstick_llm.engine.models.formats.coded import CodedWeight, stack
from yardstick_llm.engine.models.modules import PROJECTIONS, ConvertedLinear, GroupedLinear, Linear, convert_parts
from yardstick_llm.kernels import block_scaled, weight_only
from yardstick_llm.kernels.grouped_experts import Blocks
from yardstick_llm.kernels.int8 import MOST_COLUMNS, instructions
from yardstick_llm.kernels.linear import multiplies_bfloat16
from yardstick_llm.kernels.quantize import FP8, SIDE, supported
from yardstick_llm.kernels.weight_only import Codes

QKV = "attention.qkv_proj"
NAME, IN_INT8 = "stored", "stored int8"
"""Formats of layers, beside those of :data:`engine.models.formats.quantization.FORMATS`; the second multiplies in 8-bit integers
on a CPU, and so it converts dense weights too."""


class WeightOnly(ConvertedLinear):
    """Codes whose input stays as it is."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    order: Tensor | None
    """[in] int64: columns in order of their groups, where these are not side by side"""

    def __init__(self, like: Linear | GroupedLinear) -> None:
        super().__init__(like)
        self.dtype = like.weight.dtype
        self.half_width = 0
        for name in ("codes", "scales", "zeros", "offsets", "order"):
            self.register_buffer(name, None)

    def fill_codes(self, weight: CodedWeight) -> None:
        weight = weight.by_row()
        codes, width = weight.codes, weight.block[1]
        if weight.groups is not None:
            self.order = torch.argsort(weight.groups, stable=True)
            codes = codes[:, self.order]
        if weight.bits == 4:
            half = weight_only.half_of(codes.shape[1], width)
            assert half is not None  # takes() has checked it
            self.half_width, codes = half, weight_only.pack_halves(codes, half)
        self.codes = codes.contiguous()
        for name in ("scales", "zeros", "offsets"):
            part = getattr(weight, name)
            setattr(self, name, None if part is None else part.to(self.dtype).contiguous())

    @property
    def weight(self) -> Codes:
        """[out, in], or of experts, one below the other"""
        return Codes(self.codes, self.scales, self.zeros, self.offsets, self.half_width)


class WeightOnlyLinear(WeightOnly):
    """A linear layer of codes."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        x = x if self.order is None else x.index_select(1, self.order)
        return weight_only.weight_only_linear(x, self.weight, self.bias)


class WeightOnlyGroupedLinear(WeightOnly):
    """A matrix of codes for each expert."""

    def __init__(self, like: GroupedLinear) -> None:
        super().__init__(like)
        self.experts = len(like.weight)

    def forward(self, x: Tensor, experts: Tensor, blocks: Blocks | None, *, by_pair: bool = False) -> Tensor:
        """See :func:`kernels.weight_only.grouped_weight_only_linear`."""
        return weight_only.grouped_weight_only_linear(x, self.weight, experts, self.experts, blocks, by_pair=by_pair)


class BlockScaledLinear(ConvertedLinear):
    """A linear layer in FP8 whose blocks have scales."""

    codes: Tensor
    scales: Tensor

    def __init__(self, like: Linear) -> None:
        super().__init__(like)
        self.dtype = like.weight.dtype
        self.block = 0, 0
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    def fill_codes(self, weight: CodedWeight) -> None:
        self.codes, self.scales, self.block = weight.codes.contiguous(), weight.scales.contiguous(), weight.block

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        given = block_scaled.quantize_groups(x, self.block[1])
        return block_scaled.block_scaled_linear(given, self.codes, self.scales, self.block, self.bias, self.dtype)


def convert(
    layer: DecoderLayer, codes: Mapping[str, CodedWeight], device: torch.device, *, in_int8: bool = False
) -> dict[str, CodedWeight]:
    """Give a layer its parts for codes, uninitialised. -> those codes that they take. ``codes``: of whole projections, by their
    names in the layer; ``device``: where the layer will compute; ``in_int8``: see :data:`IN_INT8`."""
    if in_int8:
        int8.convert(layer)
        taken = {name for name, part in layer.named_modules() if isinstance(part, int8.Int8Linear)}
        return {name: weight for name, weight in codes.items() if name in taken and int8.takes_codes(weight)}
    wanted = [name for name in fp8.parts_of(layer) if isinstance(layer.get_submodule(name), Linear | GroupedLinear)]
    if all(name in codes and _suits_fp8(codes[name], layer.get_parameter(f"{name}.weight"), device) for name in wanted):
        fp8.convert(layer)
        return {name: codes[name] for name in wanted}
    kept = {}
    for name, weight in codes.items():
        part = _part_for(weight, layer.get_submodule(name), device)
        if part is not None:
            convert_parts(layer, {name: part})
            kept[name] = weight
    mlp = layer.mlp
    if isinstance(mlp, MLP) and isinstance(mlp.gate_up_proj, int8.Int8Linear) and isinstance(mlp.down_proj, int8.Int8Linear):
        mlp.compute = int8.compute_mlp
    plain = {name: part for name in PROJECTIONS if isinstance(part := _found(layer, name), Linear)}
    suited = [name for name, part in plain.items() if packed.suits(device, part.weight.dtype)]
    convert_parts(layer, dict.fromkeys(suited, packed.PackedLinear))
    return kept


def _found(layer: nn.Module, name: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(name)


def codes_of(layer: nn.Module, views: Mapping[str, Tensor], codes: dict[str, CodedWeight]) -> dict[str, CodedWeight]:
    """The codes of whole projections by their names in ``layer``, whose parameters the ``views`` of a checkpoint's names are parts
    of: those whose parts all have codes of one format. ``codes`` is emptied."""
    found = {}
    for name, module in layer.named_modules():
        if isinstance(module, Linear | GroupedLinear):
            parts = [codes.pop(key, None) for key in _parts_of(module, views)]
            known = [part for part in parts if part is not None]
            whole = stack(known) if known and len(known) == len(parts) else None
            if whole is not None:
                found[name] = whole
    return found


def dense_views(layer: nn.Module, views: Mapping[str, Tensor], codes: Mapping[str, CodedWeight]) -> dict[str, Tensor]:
    """The ``views`` that are read beside ``codes`` of whole projections. Keys and values are bounded by their dense weights."""
    coded = {key for name in codes if name != QKV for key in _parts_of(layer.get_submodule(name), views)}
    return {key: view for key, view in views.items() if key not in coded}


def _parts_of(module: nn.Module, views: Mapping[str, Tensor]) -> list[str]:
    """Names of the views that are parts of a projection's weight, in order."""
    storage = module.get_parameter("weight").untyped_storage().data_ptr()
    return [key for key, view in views.items() if view.untyped_storage().data_ptr() == storage]


def _suits_fp8(weight: CodedWeight, like: Tensor, device: torch.device) -> bool:
    """Whether the device multiplies e4m3 with scales of rows, as this weight has them."""
    return weight.codes.dtype == FP8 and weight.block[1] >= weight.shape[1] and _multiplies_fp8(weight, like.dtype, device)


def _multiplies_fp8(weight: CodedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    able = supported(device) and dtype == torch.bfloat16 and weight.quantizes_input and weight.groups is None
    return able and not any(side % SIDE for side in weight.shape)


def _part_for(weight: CodedWeight, like: nn.Module, device: torch.device) -> Callable[[Any], ConvertedLinear] | None:
    """The class of a projection that takes these codes; None where it has to be dense."""
    if isinstance(like, GroupedLinear):
        return WeightOnlyGroupedLinear if _is_grouped(weight, device) and weight.groups is None else None
    if not isinstance(like, Linear):
        return None
    columns, width, dtype = weight.shape[1], weight.block[1], like.weight.dtype
    if _suits_fp8(weight, like.weight, device):
        return fp8.QuantizingLinear
    if (
        weight.codes.dtype == FP8
        and width in block_scaled.SIDES
        and columns % width == 0
        and _multiplies_fp8(weight, dtype, device)
    ):
        return BlockScaledLinear
    shifted = weight.zeros is not None or weight.offsets is not None
    if device.type == "cpu" and weight.quantizes_input and width == columns and not shifted and weight.codes.dtype == torch.int8:
        able = instructions() is not None and (dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16()))
        return int8.Int8Linear if able and columns <= MOST_COLUMNS else None
    if not _is_grouped(weight, device):
        return None
    return WeightOnlyLinear


def _is_grouped(weight: CodedWeight, device: torch.device) -> bool:
    """Whether tiles of the codes can be made dense in a product: groups have as many columns each, in whole tiles."""
    columns, width = weight.shape[1], weight.block[1]
    if columns % width or not _is_even(weight) or (weight.zeros is not None and weight.offsets is not None):
        return False
    if weight.codes.dtype == FP8 and device.type != "cpu" and not supported(device):
        return False
    return weight_only.half_of(columns, width) is not None if weight.bits == 4 else width % weight_only.STEPS[-1] == 0


def _is_even(weight: CodedWeight) -> bool:
    """Whether all groups have as many columns, wherever these are."""
    return weight.groups is None or bool((torch.bincount(weight.groups, minlength=weight.scales.shape[1]) == weight.block[1]).all())
