"""A decoder whose layers multiply in FP8 (e4m3): a scale for each output channel of the weights and for each token of their input.

It is the same decoder with other parts: projections that take codes and scales, and in front of them norms and gates that leave
these instead of rows, in the kernel that computes them. Attention's output is quantised by itself, and so is the input of experts,
because their router takes it in the model's dtype. Embedding, head, norms, routers, biases, keys, values and what is added from
layer to layer stay in the model's dtype.

In a decoder that is shared by several processes, each quantises its own part. An output channel's scale covers the columns that
the process has: all of them in the projections into heads and inner columns, whose codes are then those of one process, and a
stretch of them in o_proj and down_proj, where the stretch and each token's part of the input have peaks, so scales, of their own.
They are at most as coarse as the whole's, but other numbers: scores differ from one process's by about what FP8 itself costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from yardstick_llm.engine.models.decoder import MLP, DecoderLayer
from yardstick_llm.engine.models.encoder import Layer, Model
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.modules import (
    ConvertedLinear,
    Experts,
    GroupedLinear,
    Linear,
    NoNorm,
    RMSNorm,
    convert_parts,
    fill_parts,
)
from yardstick_llm.kernels.gelu_mul import gelu_mul_quantized
from yardstick_llm.kernels.grouped_experts import Blocks, grouped_scaled_linear
from yardstick_llm.kernels.quantize import CAPABILITY, FP8, SIDE, quantize_rows, scaled_linear, supported
from yardstick_llm.kernels.rms_norm import add_rms_norm_quantized, rms_norm_quantized
from yardstick_llm.kernels.silu_mul import silu_mul_quantized

logger = logging.getLogger(__name__)

Codes = tuple[Tensor, Tensor]
"""Rows in FP8: codes [rows, size] e4m3, scales [rows, 1] float32."""


class QuantizedLinear(ConvertedLinear):
    """A linear layer of codes, which are uninitialised until :meth:`fill`."""

    weight: Tensor
    scales: Tensor

    def __init__(self, like: Linear) -> None:
        super().__init__(like)
        self.register_buffer("weight", torch.empty_like(like.weight, dtype=FP8))  # [out, in]
        self.register_buffer("scales", torch.empty((len(like.weight), 1)))
        self.dtype = like.weight.dtype

    def fill(self, weight: Tensor) -> None:
        codes, scales = quantize_rows(weight)
        self.weight.copy_(codes)
        self.scales.copy_(scales)

    def fill_codes(self, weight: CodedWeight) -> None:
        self.weight.copy_(weight.codes)
        self.scales.copy_(weight.by_row().scales)

    def forward(self, x: Codes) -> Tensor:
        """[rows, in] -> [rows, out], in the model's dtype"""
        return scaled_linear(*x, self.weight, self.scales, self.bias, self.dtype)


class QuantizingLinear(QuantizedLinear):
    """A quantised layer whose input is not quantised yet."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[rows, in] -> [rows, out]"""
        return super().forward(quantize_rows(x))


class QuantizedGroupedLinear(ConvertedLinear):
    """The codes of a matrix for each expert."""

    weight: Tensor
    scales: Tensor

    def __init__(self, like: GroupedLinear) -> None:
        super().__init__(like)
        self.register_buffer("weight", torch.empty_like(like.weight, dtype=FP8))  # [experts, out, in]
        self.register_buffer("scales", torch.empty((*like.weight.shape[:2], 1)))
        self.dtype = like.weight.dtype

    def fill(self, weight: Tensor) -> None:
        for expert, matrix in enumerate(weight):  # one at a time, because a CPU widens what it quantises
            codes, scales = quantize_rows(matrix)
            self.weight[expert].copy_(codes)
            self.scales[expert].copy_(scales)

    def fill_codes(self, weight: CodedWeight) -> None:
        self.weight.copy_(weight.codes.view(self.weight.shape))
        self.scales.copy_(weight.by_row().scales.view(self.scales.shape))

    def forward(self, x: Codes, experts: Tensor, blocks: Blocks | None, *, by_pair: bool = False) -> Tensor:
        """[rows, in] -> [rows · chosen, out], in the model's dtype; see :func:`kernels.grouped_experts.grouped_scaled_linear`."""
        return grouped_scaled_linear(x, (self.weight, self.scales), experts, self.dtype, blocks, by_pair=by_pair)


class QuantizedRMSNorm(nn.Module):
    """An :class:`RMSNorm` that leaves codes, with the weight of the one it is made like."""

    def __init__(self, like: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = like.weight, like.eps

    def forward(self, x: Tensor) -> Codes:
        """[tokens, size] -> its codes and scales"""
        return rms_norm_quantized(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Codes, Tensor]:
        """(normalised sum, sum)"""
        codes, scales, total = add_rms_norm_quantized(x, residual, self.weight, self.eps)
        return (codes, scales), total


Parts = dict[str, Callable[[Any], nn.Module]]
"""Parts of a layer and their quantised replacements."""

ATTENTION: Parts = {
    "input_norm": QuantizedRMSNorm,
    "attention.qkv_proj": QuantizedLinear,
    "attention.o_proj": QuantizingLinear,
}
DENSE: Parts = {
    "post_attention_norm": QuantizedRMSNorm,
    "mlp.gate_up_proj": QuantizedLinear,
    "mlp.down_proj": QuantizedLinear,
}
EXPERTS: Parts = {"mlp.gate_up": QuantizedGroupedLinear, "mlp.down": QuantizedGroupedLinear}
SHARED: Parts = {"mlp.shared.gate_up_proj": QuantizedLinear, "mlp.shared.down_proj": QuantizedLinear}
"""Parts of the shared expert, which computes all tokens."""

BEFORE = {"attention.qkv_proj": "input_norm", "mlp.gate_up_proj": "post_attention_norm"}
"""Norms that leave codes for a projection. If a model lacks them, the projection quantises its input itself."""


def convert(layer: Layer) -> None:
    """Give a layer its parts in FP8, uninitialised, in place of those it has."""
    assert isinstance(layer, DecoderLayer)
    convert_parts(layer, parts_of(layer))
    if isinstance(layer.mlp, Experts):
        layer.mlp.input, layer.mlp.gate = quantize_rows, silu_mul_quantized
    for mlp in layer.modules():
        if isinstance(mlp, MLP):
            mlp.gate = gelu_mul_quantized if mlp.gelu else silu_mul_quantized


def parts_of(layer: DecoderLayer) -> Parts:
    """The parts that :func:`convert` replaces."""
    wanted = ATTENTION | (EXPERTS if isinstance(layer.mlp, Experts) else DENSE)
    if isinstance(layer.mlp, Experts) and layer.mlp.shared is not None:
        wanted |= SHARED
    parts = {name: part for name, part in wanted.items() if not isinstance(layer.get_submodule(name), NoNorm)}
    for name, norm in BEFORE.items():
        if name in parts and norm not in parts:
            parts[name] = QuantizingLinear
    return parts


fill = fill_parts


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises :class:`ModelError` where the device cannot multiply in FP8."""
    if device.type == "cpu":
        logger.warning(
            "--quantize fp8 is emulated on a CPU: results are right, and take longer than without it; use --quantize int8"
        )
        return
    if not supported(device):
        needed, found = (".".join(map(str, version)) for version in (CAPABILITY, torch.cuda.get_device_capability(device)))
        raise ModelError(
            f"--quantize fp8 needs a GPU of compute capability {needed} or later, and this one has {found}; leave --quantize out."
        )
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(f"--quantize fp8 computes in bfloat16 on a GPU, and --dtype is {name}; leave one of the two out.")


def check_shapes(decoder: Model) -> None:
    """Raises :class:`ModelError` where a GPU could not multiply with the layers' matrices; a CPU takes no others, either."""
    layers = {type(layer.mlp): layer for layer in decoder.layers if isinstance(layer, DecoderLayer)}
    for layer in layers.values():
        for name in parts_of(layer):
            module = layer.get_submodule(name)
            if isinstance(module, Linear | GroupedLinear) and any(side % SIDE for side in module.weight.shape[-2:]):
                raise ModelError(
                    f"--quantize fp8 takes matrices whose sides are multiples of {SIDE}, and the model's {name.rpartition('.')[2]} "
                    f"is {list(module.weight.shape[-2:])} in each process; leave --quantize out."
                )
