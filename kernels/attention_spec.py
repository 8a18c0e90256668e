"""Windows, scales and soft caps of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from yardstick_llm.kernels.soft_cap import NO_CAP


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Scale, window and soft cap of an attention layer."""

    scale: float | None = None
    """Factor of the products of queries and keys; None for ``1 / sqrt(head_dim)``."""
    window: int | None = None
    """Most tokens that a query sees, its own included; None for all."""
    soft_cap: float = NO_CAP
    """Soft cap of the scaled products (:mod:`kernels.soft_cap`)."""

    def scale_of(self, head_dim: int) -> float:
        """Return the scale for heads of ``head_dim`` elements."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = AttentionSpec()
