"""Soft caps of logits: ``cap · tanh(logits / cap)``, which keeps them between ``-cap`` and ``cap``.

Source: Gemma Team 2024, "Gemma 2", arXiv 2408.00118, section 2.
"""

from __future__ import annotations

from torch import Tensor

from yardstick_llm.kernels.runtime import jit, tl

NO_CAP = 0.0
"""Stands for the absence of a cap."""


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Cap ``logits`` softly, in plain PyTorch. Returns them as they are for :data:`NO_CAP`."""
    return logits if cap == NO_CAP else (logits / cap).tanh() * cap


@jit()
def capped(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """:func:`soft_cap` in a kernel, for a cap above 0. Triton has no tanh; ``tanh(x) = 2 · sigmoid(2x) - 1``."""
    return cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
