"""Products of matrices in float32 on a CPU, by the compiled loops of :mod:`kernels.native`.

What stands around them, biases, activations and norms, can be computed by the same call (:mod:`kernels.encoder_layers`), and
threads can share a product of few rows without waking for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yardstick_llm.kernels.row_chunks import share
from yardstick_llm.kernels.runtime import flat, loops

PART = 1 << 24
"""Multiplications for which another thread is worth its start."""


@dataclass(frozen=True, slots=True)
class FloatPanels:
    """A weight, [out, in] float32, as the loops multiply it.

    A panel has some outputs, side by side for each column, the last panel fewer.
    """

    numbers: Tensor
    """[out · in]: [panels, in, outputs of a panel]"""
    out: int
    nothing: Tensor
    """[out], zeros: a bias"""

    def __len__(self) -> int:
        return self.out


def takes(out: int) -> bool:
    """Whether a weight with ``out`` outputs can be packed."""
    return out % int(loops().LANES) == 0


def pack(weight: Tensor) -> FloatPanels:
    """weight: [out, in] float32 on a CPU, for which :func:`takes`."""
    (out, columns), wide = weight.shape, loops().WIDE
    whole = out // wide * wide
    panels = weight[:whole].view(-1, wide, columns).transpose(1, 2), weight[whole:].t()
    return FloatPanels(torch.cat([part.reshape(-1) for part in panels]), out, torch.zeros(out))


def panel_linear(x: Tensor, weight: FloatPanels, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias``. x: [rows, in] float32 -> [rows, out]"""
    rows, size = x.shape
    out = torch.empty(rows, weight.out)
    given: tuple[Any, ...] = (
        flat(x), flat(weight.numbers), flat(weight.nothing if bias is None else bias), flat(out), rows, size,
    )  # fmt: skip
    panels = -(-weight.out // loops().WIDE)
    parts = min(panels, torch.get_num_threads(), 1 + rows * weight.numbers.numel() // PART)
    spans = [slice(panels * part // parts, panels * (part + 1) // parts) for part in range(parts)]
    share(lambda span: loops().multiply(*given, span.start, span.stop), spans)
    return out
