"""A float32 decoder whose layers keep their weights in oneDNN's own layout, for inference on a CPU (:mod:`kernels.linear`).

Products equal those of plain weights, to rounding, but oneDNN need not rearrange the weights in each of them.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import Experts
from engine.models.modules import Linear
from kernels.linear import pack, packed_linear

PROJECTIONS = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""Parts of a layer that are converted."""


class PackedLinear(nn.Module):
    """A linear layer of a packed weight, which is missing until :meth:`fill`; its bias is that of the layer it is made like."""

    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.bias = like.bias
        self.weight: Any = None
        """What :meth:`pack` returns."""

    def fill(self, weight: Tensor) -> None:
        """weight: [out, in]."""
        self.weight = self.pack(weight)

    def pack(self, weight: Tensor) -> Any:
        """The layout that :meth:`forward` multiplies with."""
        return pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return packed_linear(x, self.weight, self.bias)


def suits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers of a model of this dtype gain from packed weights on this device; only measured on x86-64."""
    onednn = platform.machine() == "x86_64" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return onednn and device.type == "cpu" and dtype == torch.float32


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """The device is one that :func:`suits`."""
    assert suits(device, dtype)


def check_shapes(decoder: Decoder) -> None:
    """All shapes can be packed."""


def convert(layer: DecoderLayer, part: type[PackedLinear] = PackedLinear) -> None:
    """Give a layer projections of the kind ``part``, without weights, in place of those it has."""
    for name in PROJECTIONS:
        if name.startswith("mlp.") and isinstance(layer.mlp, Experts):
            continue
        projection = layer.get_submodule(name)
        assert isinstance(projection, Linear)
        layer.set_submodule(name, part(projection))


@torch.no_grad()
def fill(layer: DecoderLayer, source: DecoderLayer) -> None:
    """Pack the weights of ``source`` into ``layer``, which was converted and otherwise like it."""
    for name, parameter in layer.named_parameters():  # norms and biases
        parameter.copy_(source.get_parameter(name))
    for name, part in layer.named_modules():
        if isinstance(part, PackedLinear):
            part.fill(source.get_parameter(f"{name}.weight"))
