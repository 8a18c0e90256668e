"""An adapter in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine import wire


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
    """:data:`~engine.lora.layout.WHOLE` modules in place of the base model's, [vocab, hidden], on the host as ``weights`` are."""

    @property
    def digest(self) -> str:
        """Digest of weights and configuration."""
        return self.description.digest
