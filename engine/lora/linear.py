"""The layers' linear projections, with the additions of the adapters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.device.transfer import Copy
from engine.lora.layout import Layout
from engine.models.decoder import Decoder, Rows
from kernels.lora import LoraProduct, LoraRows, LoraRun, add_lora


class UploadedRows(NamedTuple):
    """:class:`LoraRows` whose tables travel to the device with a step's inputs."""

    runs: tuple[LoraRun, ...]
    blocks: Copy
    size: int
    order: Copy | None = None

    @property
    def arrived(self) -> LoraRows:
        """The rows, once the upload is queued."""
        return LoraRows(self.runs, self.blocks.tensor, self.size, None if self.order is None else self.order.tensor)


@dataclass(slots=True)
class StepRows:
    """The rows with an adapter of the step that is being launched. All projections share one object."""

    tokens: int = 0
    """Tokens of the step; 0: no request of the step has an adapter."""
    all: UploadedRows | LoraRows | None = None
    """Rows of all tokens of the step; None if ``tokens`` is 0. While a step is captured, they are on the device already."""
    read: UploadedRows | None = None
    """The rows that readouts read, which are all that the last layer computes after its attention."""
    embeddings: tuple[tuple[int, int, Tensor], ...] = ()
    """First row, end and weight, [vocab, hidden], of adapters with embeddings of their own."""

    def of(self, count: int) -> LoraRows:
        """The rows of a product of ``count`` rows."""
        found = self.all if count == self.tokens else self.read
        assert found is not None
        return found if isinstance(found, LoraRows) else found.arrived


class AdaptedLinear(nn.Module):
    """A projection of any format, and the additions of adapters in the model's dtype."""

    def __init__(self, base: nn.Module, step: StepRows, product: LoraProduct, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self._step, self._product, self._dtype = step, product, dtype

    def forward(self, x: Rows) -> Tensor:
        """[rows, in] -> [rows, out]"""
        y: Tensor = self.base(x)
        step = self._step
        if step.tokens == 0:
            return y
        return add_lora(y, self._plain(x), self._product, step.of(len(y)))

    def _plain(self, x: Rows) -> Tensor:
        """Rows in the model's dtype; those of FP8 are the values that the base multiplies."""
        if isinstance(x, Tensor):
            return x
        codes, scales = x
        return (codes.float() * scales).to(self._dtype)


class AdaptedEmbedding(nn.Module):
    """The embedding, and that of adapters that have their own."""

    def __init__(self, base: nn.Embedding, step: StepRows) -> None:
        super().__init__()
        self.base = base
        self._step = step

    @property
    def weight(self) -> Tensor:
        """The base model's."""
        return self.base.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows] int64 -> [rows, hidden]"""
        x: Tensor = self.base(tokens)
        for begin, end, weight in self._step.embeddings:
            x[begin:end] = functional.embedding(tokens[begin:end], weight)
        return x


def adapt(decoder: Decoder, layout: Layout, step: StepRows, products: Sequence[LoraProduct], *, embeddings: bool = False) -> None:
    """Replace the projections of ``decoder``, and its embedding where adapters may have their own. ``products``: in the order of
    the layout."""
    if embeddings:
        decoder.set_submodule("embed", AdaptedEmbedding(decoder.embed, step))
    dtype = decoder.embed.weight.dtype
    for product, own in zip(layout.products, products, strict=True):
        layer = decoder.layers[product.layer]
        layer.set_submodule(product.module, AdaptedLinear(layer.get_submodule(product.module), step, own, dtype))
