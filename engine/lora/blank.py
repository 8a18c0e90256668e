"""An adapter of zeros on all projections, with which the kernels of adapters are compiled before the engine is ready."""

from __future__ import annotations

import torch

from engine import wire
from engine.lora.adapter import LoadedAdapter
from engine.lora.layout import Layout
from engine.lora.reader import capacity_of, places_of
from kernels.lora_layout import padded_rank

DIGEST = "warm-up"


def blank_adapter(layout: Layout, info: wire.Info, dtype: torch.dtype, *, pinned: bool = False) -> LoadedAdapter:
    """Return an adapter of rank 1; kernels take the rank at run time, so others need no compilation. ``pinned``: see
    :attr:`engine.lora.reader.AdapterReader.pinned`."""
    weights = torch.zeros(capacity_of(layout, 1), dtype=dtype, pin_memory=pinned)
    table = places_of(layout, [padded_rank(1)] * len(layout.products))
    on_host = torch.from_numpy(table)
    description = wire.Adapter(DIGEST, DIGEST, 1, weights.nbytes, info.capabilities, info.classes, info.multi_label)
    return LoadedAdapter(description, info, weights, on_host.pin_memory() if pinned else on_host, table[1], None)
