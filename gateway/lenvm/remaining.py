"""From the length model's value to tokens: v = 1 − γ^(tokens to come), so tokens to come = ln(1 − v) / ln γ.

What this gives is a proxy. v is a mean over all ways in which the text may go on, and the inverse of a mean lies below the mean
of the inverses (ln is concave), the further the less certain the length is. "Length Value Model", arXiv 2604.27039.
"""

from __future__ import annotations

import math

from engine import wire

LARGEST = 1 - wire.SMALLEST_VALUE
"""Beyond this, a value that comes as a single-precision number says only "long"."""


def remaining_tokens(value: float, gamma: float) -> float:
    """The proxy for a ``value`` in [0, 1] that was rounded on its way, hence at most ln 1e-9 / ln γ."""
    return math.log1p(-min(value, LARGEST)) / math.log(gamma)


def value_and_remaining(logit: float, gamma: float) -> tuple[float, float]:
    """v = σ(z) and the proxy, exact in double precision also where v rounds to 1: ln(1 − v) = −softplus(z)."""
    small = math.exp(-abs(logit))
    value = 1 / (1 + small) if logit >= 0 else small / (1 + small)
    softplus = max(logit, 0.0) + math.log1p(small)
    return value, -softplus / math.log(gamma)
