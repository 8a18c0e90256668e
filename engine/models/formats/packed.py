"""A decoder whose layers keep their weights in the own layout of a library, for inference on a CPU (:mod:`kernels.linear`).

Products equal those of plain weights, to rounding, but the library need not rearrange the weights in each of them.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from yardstick_llm.engine.models.encoder import FUNCTIONS, EncoderLayer, FeedForward, Layer, Model
from yardstick_llm.engine.models.modules import PROJECTIONS, ConvertedLinear, Experts, convert_parts, fill_parts
from yardstick_llm.kernels import panels
from yardstick_llm.kernels.linear import ONEDNN, PackedWeight, library, pack, packed_gelu, packed_linear
from yardstick_llm.kernels.panels import FloatPanels, panel_linear
from yardstick_llm.kernels.runtime import compiles

GELUS = FUNCTIONS["gelu"], FUNCTIONS["gelu_tanh"]


class PackedLinear(ConvertedLinear):
    """A linear layer of a packed weight."""

    weight: PackedWeight

    def fill(self, weight: Tensor) -> None:
        self.weight = pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return packed_linear(x, self.weight, self.bias)


class PanelLinear(ConvertedLinear):
    """A linear layer of a weight that compiled loops multiply."""

    weight: FloatPanels

    def fill(self, weight: Tensor) -> None:
        self.weight = panels.pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return panel_linear(x, self.weight, self.bias)


def suits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers of a model of this dtype gain from packed weights on this device. Only x86-64 was measured, and bfloat16
    with AMX only."""
    if device.type != "cpu" or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.cpu.get_capabilities().get("amx_bf16")))


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """The device is one that :func:`suits`."""
    assert suits(device, dtype)


def check_shapes(decoder: Model) -> None:
    """All shapes can be packed."""


def convert(layer: Layer) -> None:
    """Give a layer packed projections, without weights, in place of those it has. Experts stay as they are."""
    names = [name for name in PROJECTIONS if not (name.startswith("mlp.") and isinstance(layer.mlp, Experts))]
    if isinstance(layer, EncoderLayer) and _takes_panels(layer, names):
        convert_parts(layer, dict.fromkeys(names, PanelLinear))
        return
    convert_parts(layer, dict.fromkeys(names, PackedLinear))
    if isinstance(layer.mlp, FeedForward) and not layer.mlp.gated and layer.mlp.activation in GELUS:
        layer.mlp.compute = _compute_feed_forward


def _takes_panels(layer: EncoderLayer, names: Sequence[str]) -> bool:
    """Whether compiled loops take the named weights of a layer, on a processor where MKL is not the faster library."""
    weights = [layer.get_submodule(name).get_parameter("weight") for name in names]
    return all(compiles(each.detach()) and panels.takes(len(each)) for each in weights) and library() == ONEDNN


def _compute_feed_forward(mlp: FeedForward, x: Tensor) -> Tensor:
    """[tokens, hidden] -> [tokens, hidden]"""
    up, down = mlp.gate_up_proj, mlp.down_proj
    assert isinstance(up, PackedLinear)
    return down(packed_gelu(x, up.weight, up.bias, tanh=mlp.activation is FUNCTIONS["gelu_tanh"]))


fill = fill_parts
