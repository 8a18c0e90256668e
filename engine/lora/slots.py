"""Memory of the device for adapters: slots of one size, given to the least recently used adapters last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.lora.adapter import LoadedAdapter
from engine.lora.layout import WHOLE, Layout, Product
from kernels.lora_layout import LoraMatrices, LoraProduct


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
