"""The layers' linear projections, with the additions of the adapters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.device.transfer import Copy
from engine.lora.layout import Layout
from engine.models.decoder import Decoder, Rows
from kernels.lora import LoraMatrices, LoraRows, LoraRun, add_lora

NO_ROWS = LoraRows(())


@dataclass(slots=True)
class StepRows:
    """The rows with an adapter of the step that is being launched. All projections share one object."""

    tokens: int = 0
    """Tokens of the step; 0: no request of the step has an adapter."""
    all: LoraRows = NO_ROWS
    """Of all tokens."""
    read_runs: tuple[LoraRun, ...] = ()
    """Of the rows that readouts read. The last layer computes no others behind attention."""
    read_order: Copy = field(default_factory=Copy)

    def of(self, count: int) -> LoraRows:
        """The rows of a product of ``count`` rows."""
        return self.all if count == self.tokens else LoraRows(self.read_runs, self.read_order.tensor)


class AdaptedLinear(nn.Module):
    """A projection of any format, and the additions of adapters in the model's dtype."""

    def __init__(self, base: nn.Module, step: StepRows, matrices: Sequence[LoraMatrices | None], dtype: torch.dtype) -> None:
        """``matrices``: of this product, by slot."""
        super().__init__()
        self.base = base
        self._step, self._matrices, self._dtype = step, matrices, dtype

    def forward(self, x: Rows) -> Tensor:
        """[rows, in] -> [rows, out]"""
        y: Tensor = self.base(x)
        step = self._step
        if step.tokens == 0:
            return y
        return add_lora(y, self._plain(x), self._matrices, step.of(len(y)))

    def _plain(self, x: Rows) -> Tensor:
        """Rows in the model's dtype; those of FP8 are the values that the base multiplies."""
        if isinstance(x, Tensor):
            return x
        codes, scales = x
        return (codes.float() * scales).to(self._dtype)


def adapt(decoder: Decoder, layout: Layout, step: StepRows, matrices: Sequence[Sequence[LoraMatrices | None]]) -> None:
    """Replace the projections of ``decoder``. ``matrices``: [product][slot]."""
    dtype = decoder.embed.weight.dtype
    for product, own in zip(layout.products, matrices, strict=True):
        layer = decoder.layers[product.layer]
        layer.set_submodule(product.module, AdaptedLinear(layer.get_submodule(product.module), step, own, dtype))
