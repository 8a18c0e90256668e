"""Conversion of a decoder's layers to another format of weights, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.decoder import DecoderLayer
from engine.models.experts import GroupedLinear
from engine.models.modules import Linear

PROJECTIONS = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""Linear layers of a :class:`DecoderLayer`."""


class ConvertedLinear(nn.Module):
    """A linear layer in another format. It has the bias of the layer it is made like, and no weight before :meth:`fill`."""

    def __init__(self, like: Linear | GroupedLinear) -> None:
        super().__init__()
        self.bias = like.bias

    def fill(self, weight: Tensor) -> None:
        """Convert ``weight``, [out, in] or [experts, out, in], which can be overwritten afterwards."""
        raise NotImplementedError


def convert(layer: DecoderLayer, parts: Mapping[str, Callable[[Any], nn.Module]]) -> None:
    """Replace the named parts of a layer by those that ``parts`` makes like them. The memory of the old ones is freed."""
    for name, part in parts.items():
        layer.set_submodule(name, part(layer.get_submodule(name)))


@torch.no_grad()
def fill(layer: DecoderLayer, source: DecoderLayer) -> None:
    """Convert the weights of ``source`` into ``layer``, whose other parameters are like those of ``source``."""
    for name, parameter in layer.named_parameters():  # norms and biases
        parameter.copy_(source.get_parameter(name))
    for name, part in layer.named_modules():
        if isinstance(part, ConvertedLinear):
            part.fill(source.get_parameter(f"{name}.weight"))
