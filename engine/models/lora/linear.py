"""The layers' linear projections, with the additions of the adapters of a step.

On a GPU, the operation behind a large projection makes its additions: the gate those of gate and up, and the kernel that rotates
and writes keys those of queries, keys and values. Operations that need whole rows do not: a gate that quantises its rows to FP8,
and a norm over all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from yardstick_llm.engine.models.decoder import MLP, Decoder, DecoderLayer, Rows
from yardstick_llm.engine.models.lora.slots import DeviceSlots, Layout
from yardstick_llm.engine.models.modules import Unadded
from yardstick_llm.engine.models.transfer import Copy
from yardstick_llm.kernels.gelu_mul import gelu_mul
from yardstick_llm.kernels.lora import expand_lora, shrink_lora
from yardstick_llm.kernels.lora_gate import lora_gate
from yardstick_llm.kernels.lora_layout import (
    FEW_ROWS,
    ROW_BLOCKS,
    LoraProduct,
    LoraRows,
    LoraRun,
    block_runs,
    most_blocks,
    padded_rank,
)
from yardstick_llm.kernels.silu_mul import silu_mul


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

    def __init__(self, base: nn.Module, step: StepRows, product: LoraProduct, *, defers: bool) -> None:
        """``defers``: leave the additions to the operation behind the projection."""
        super().__init__()
        self.base = base
        self.defers = defers
        self._step, self._product = step, product

    def forward(self, x: Rows) -> Tensor | Unadded:
        """[rows, in] -> [rows, out]"""
        y: Tensor = self.base(x)
        step = self._step
        if step.tokens == 0:
            return y
        rows, scales = (x, None) if isinstance(x, Tensor) else x
        delta = shrink_lora(rows, self._product, step.of(len(y)), scales)
        if delta is None:
            return y
        return Unadded(y, delta) if self.defers else expand_lora(y, delta)


class AdaptedGate:
    """The gate of an MLP, which may have additions to make to gate and up."""

    def __init__(self, mlp: MLP) -> None:
        self._plain, self._gelu = mlp.gate, mlp.gelu

    def __call__(self, gate_up: Tensor | Unadded) -> Rows:
        """gate ‖ up, [tokens, 2 · intermediate] -> [tokens, intermediate]"""
        return lora_gate(*gate_up, gelu=self._gelu) if isinstance(gate_up, Unadded) else self._plain(gate_up)


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


def adapt(
    decoder: Decoder,
    layout: Layout,
    step: StepRows,
    products: Sequence[LoraProduct],
    *,
    fused: bool = False,
    embeddings: bool = False,
) -> None:
    """Replace the projections of ``decoder``, and its embedding where adapters may have their own.

    ``products``: in the order of the layout. ``fused``: let the operations behind the large projections make their additions.
    """
    if embeddings:
        decoder.set_submodule("embed", AdaptedEmbedding(decoder.embed, step))
    for product, own in zip(layout.products, products, strict=True):
        layer = decoder.layers[product.layer]
        assert isinstance(layer, DecoderLayer)
        defers = fused and _can_defer(layer, product.module)
        layer.set_submodule(product.module, AdaptedLinear(layer.get_submodule(product.module), step, own, defers=defers))
        if defers and isinstance(layer.mlp, MLP) and product.module == "mlp.gate_up_proj":
            layer.mlp.gate = AdaptedGate(layer.mlp)


def _can_defer(layer: DecoderLayer, module: str) -> bool:
    if module == "mlp.gate_up_proj":
        return isinstance(layer.mlp, MLP) and layer.mlp.gate in (silu_mul, gelu_mul)
    return module == "attention.qkv_proj" and not layer.attention.over_heads


COLUMNS = 3
"""Numbers of a block."""


class CapturedRows:
    """Gives the decoder's projections the table while a step is captured, and fills it before each replay.

    Kernels find an adapter's matrices and ranks in the table of its slot, so a graph holds for all adapters that are ever placed.
    """

    def __init__(self, step: StepRows, slots: DeviceSlots, max_rank: int, buckets: Sequence[int]) -> None:
        """``step``: the rows that the projections read. ``buckets``: tokens of the captured steps."""
        self._step, self._places, self._max_rank = step, slots.count, padded_rank(max_rank)
        # The largest bucket has large blocks, so that the kernels of both sizes are compiled while graphs are captured.
        self._few = min(FEW_ROWS * self._places, max(FEW_ROWS, max(buckets) - 1))
        numbers = max(COLUMNS * self._blocks(tokens) for tokens in buckets)
        self._table = torch.zeros(numbers, dtype=torch.int64, device=slots.device)

    @property
    def active(self) -> bool:
        """Whether the step that is being launched has a request with an adapter."""
        return self._step.tokens > 0

    @contextmanager
    def captured(self, tokens: int) -> Iterator[None]:
        """The projections of a step of ``tokens`` read the table."""
        self._table.zero_()
        self._step.tokens = tokens
        self._step.all = LoraRows((), self._within(tokens), self._size(tokens), most_rank=self._max_rank)
        try:
            yield
        finally:
            self._step.tokens, self._step.all = 0, None

    def fill(self, tokens: int) -> None:
        """Queue the copy of the blocks of the step that is being launched, padded for a graph of ``tokens``."""
        assert self._step.all is not None
        blocks, _ = block_runs(self._step.all.runs, tokens, self._size(tokens))
        table = self._within(tokens)
        packed = torch.zeros(len(table), dtype=torch.int64, pin_memory=table.is_cuda)
        packed[: blocks.size] = torch.from_numpy(blocks.reshape(-1))
        table.copy_(packed, non_blocking=True)

    def _within(self, tokens: int) -> Tensor:
        return self._table[: COLUMNS * self._blocks(tokens)]

    def _blocks(self, tokens: int) -> int:
        return most_blocks(tokens, self._places, self._size(tokens))

    def _size(self, tokens: int) -> int:
        return ROW_BLOCKS[tokens > self._few]
