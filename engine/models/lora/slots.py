"""LoRA adapters in memory: of the host, and slots of the device, given to the least recently used adapters last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.kernels.lora_layout import LoraMatrices, LoraProduct


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoadedAdapter:
    """An adapter that has been checked. Requests refer to it, so it stays until the last of them has ended.

    ``weights`` has, for each product that the adapter changes, the matrix A, [parts · rank, inputs], and behind it the matrix B,
    [outputs, rank], already multiplied by the scale. Parts of smaller rank, or which the adapter leaves alone, have zeros.
    """

    description: wire.Adapter
    info: wire.Info
    """Description of the model for requests with this adapter."""
    weights: Tensor
    """[numbers], on the host in the model's dtype; pinned for a GPU."""
    table: Tensor
    """[2, products] int64, on the host: where each product's matrices begin in ``weights``, and their rank; 0: unchanged."""
    ranks: npt.NDArray[np.int64]
    """[products]; the second row of ``table``."""
    head: Tensor | None
    """[classes, hidden] float32, on the host, pinned for a GPU; None: that of the base model."""
    modules: Mapping[str, Tensor] = field(default_factory=dict)
    """:data:`~engine.models.lora.slots.WHOLE` modules in place of the base model's, [vocab, hidden], on the host as ``weights``
    are."""

    @property
    def digest(self) -> str:
        """Digest of weights and configuration."""
        return self.description.digest


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that an adapter may change, by their names in checkpoints; with fused checkpoints, :data:`FUSED` as well."""
FUSED = ("qkv_proj", "gate_up_proj")
WHOLE = ("lm_head", "embed_tokens")
"""Modules of [vocab, hidden] numbers that an adapter may bring whole, where the engine takes them."""


class Part(NamedTuple):
    """One projection of the checkpoint within a fused one."""

    name: str
    """Below ``model.layers.N.``, such as ``self_attn.q_proj``."""
    outputs: int


class Product(NamedTuple):
    """One matrix product of a layer."""

    layer: int
    module: str
    """Below the layer of the decoder, such as ``attention.qkv_proj``."""
    inputs: int
    parts: tuple[Part, ...]
    """In the order of the output's columns."""

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        return sum(part.outputs for part in self.parts)

    def numbers(self, rank: int) -> int:
        """Numbers of an adapter of this rank."""
        return rank * (len(self.parts) * self.inputs + self.outputs)


class Layout:
    """The products of a decoder that adapters may change, in the order of their index."""

    def __init__(self, config: ModelConfig) -> None:
        self.products = list(_products(config))
        self.places = {
            (product.layer, part.name): (index, number)
            for index, product in enumerate(self.products)
            for number, part in enumerate(product.parts)
        }
        """Index of the product and number of the part, by layer and name of the projection."""
        self.layers = config.num_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.has_token_head = config.lm_head
        self.tied = config.tied


def _products(config: ModelConfig) -> Iterator[Product]:
    hidden, size, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    if config.fused_projections:
        qkv: tuple[Part, ...] = (Part("self_attn.qkv_proj", q + 2 * kv),)
    else:
        qkv = Part("self_attn.q_proj", q), Part("self_attn.k_proj", kv), Part("self_attn.v_proj", kv)
    gate_up: tuple[Part, ...] = (Part("mlp.gate_up_proj", 2 * size),)
    if not (config.fused_projections or config.fused_mlp):
        gate_up = Part("mlp.gate_proj", size), Part("mlp.up_proj", size)
    for layer in range(config.num_layers):
        if not config.interleaved:  # whose rows are reordered
            yield Product(layer, "attention.qkv_proj", hidden, qkv)
        yield Product(layer, "attention.o_proj", q, (Part("self_attn.o_proj", hidden),))
        if config.experts is None or layer not in config.experts.layers:
            yield Product(layer, "mlp.gate_up_proj", hidden, gate_up)
            yield Product(layer, "mlp.down_proj", size, (Part("mlp.down_proj", hidden),))


class DeviceSlots:
    """Copies adapters from the host to slots of the device, and finds their matrices there.

    A copy is queued behind the steps that were launched before, so a slot is never overwritten while one of them reads it. Its
    source is in pinned memory. An adapter may be unloaded while it is copied: torch reuses pinned memory only after the copies from
    it have ended.
    """

    def __init__(
        self,
        layout: Layout,
        count: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        modules: Sequence[str] = (),
    ) -> None:
        """``capacity``: numbers of a slot. ``modules``: whole modules for which each slot has room as well."""
        self._layout = layout
        self._buffer = torch.empty((count, capacity), dtype=dtype, device=device)
        self._table = torch.zeros((count, 2, len(layout.products)), dtype=torch.int64, device=device)
        """See :attr:`kernels.lora.LoraProduct.table`."""
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        """Slots by the digest of their adapter, the least recently used first."""
        self._free = list(reversed(range(count)))
        self._matrices: list[list[LoraMatrices | None]] = [[None] * count for _ in layout.products]
        """[product][slot]"""
        self.products = [
            LoraProduct(own, self._buffer, self._table, index, product.inputs, tuple(part.outputs for part in product.parts))
            for index, (product, own) in enumerate(zip(layout.products, self._matrices, strict=True))
        ]
        """In the order of the layout."""
        self.heads: dict[str, Tensor] = {}
        """Classification heads on the device, by the digest of their adapter."""
        room = count, layout.vocab_size, layout.hidden_size
        self._rooms = {name: torch.empty(room, dtype=dtype, device=device) for name in modules}
        self.modules: dict[str, dict[str, Tensor]] = {name: {} for name in WHOLE}
        """Whole modules on the device, [vocab, hidden], by name and by the digest of their adapter."""
        self.swaps = 0
        """Copies so far."""

    @property
    def device(self) -> torch.device:
        """Device of the slots."""
        return self._buffer.device

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._buffer)

    @property
    def resident(self) -> list[str]:
        """Digests of the adapters that have a slot, the least recently used first."""
        return list(self._slot_of)

    def place(self, adapters: Sequence[LoadedAdapter]) -> dict[str, int]:
        """Give each of a step's ``adapters``, at most :attr:`count`, a slot. Return the slots by digest."""
        assert len({adapter.digest for adapter in adapters}) <= self.count
        for adapter in adapters:
            if adapter.digest in self._slot_of:
                self._slot_of.move_to_end(adapter.digest)
        for adapter in adapters:
            if adapter.digest not in self._slot_of:
                self._copy(adapter, self._take())
        return {adapter.digest: self._slot_of[adapter.digest] for adapter in adapters}

    def reset(self) -> None:
        """Forget all adapters, and the copies so far."""
        self._free = list(reversed(range(self.count)))
        self._slot_of.clear()
        self.heads.clear()
        for found in self.modules.values():
            found.clear()
        for matrices in self._matrices:
            matrices[:] = [None] * self.count
        self.swaps = 0

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        digest, slot = self._slot_of.popitem(last=False)
        self.heads.pop(digest, None)
        for found in self.modules.values():
            found.pop(digest, None)
        return slot

    def _copy(self, adapter: LoadedAdapter, slot: int) -> None:
        target = self._buffer[slot, : len(adapter.weights)]
        target.copy_(adapter.weights, non_blocking=True)
        self._table[slot].copy_(adapter.table, non_blocking=True)
        if adapter.head is not None:
            self.heads[adapter.digest] = adapter.head.to(self._buffer.device, non_blocking=True)
        for name, module in adapter.modules.items():
            own = self.modules[name][adapter.digest] = self._rooms[name][slot]
            own.copy_(module, non_blocking=True)
        table = adapter.table.tolist()
        for product, matrices, begin, rank in zip(self._layout.products, self._matrices, *table, strict=True):
            matrices[slot] = _matrices(target, product, begin, rank) if rank else None
        self._slot_of[adapter.digest] = slot
        self.swaps += 1


def _matrices(weights: Tensor, product: Product, begin: int, rank: int) -> LoraMatrices:
    behind = begin + len(product.parts) * rank * product.inputs
    b = weights[behind : behind + product.outputs * rank].view(product.outputs, rank)
    parts, first = [], 0
    for part in product.parts:
        parts.append((first, first + part.outputs, b[first : first + part.outputs]))
        first += part.outputs
    return LoraMatrices(weights[begin:behind].view(-1, product.inputs), tuple(parts), rank)
