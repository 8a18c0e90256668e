"""Converts a length value to tokens: v = 1 − γ^(remaining tokens), so remaining tokens = ln(1 − v) / ln γ.

The result is a proxy. v is a mean over all continuations of the text, and the inverse of a mean lies below the mean of the inverses
(ln is concave); the difference grows with the uncertainty of the length. "Length Value Model", arXiv 2604.27039.
"""

from __future__ import annotations

import math

from engine import wire

LARGEST = 1 - wire.SMALLEST_VALUE
"""Largest single-precision value that is converted exactly; larger ones only mean "long"."""


def remaining_tokens(value: float, gamma: float) -> float:
    """Return the proxy for a rounded ``value`` in [0, 1]. The bound :data:`LARGEST` limits it to at most ln 1e-9 / ln γ."""
    return math.log1p(-min(value, LARGEST)) / math.log(gamma)


def value_and_remaining(logit: float, gamma: float) -> tuple[float, float]:
    """Return v = σ(z) and the proxy, accurate in double precision even if v rounds to 1: ln(1 − v) = −softplus(z)."""
    small = math.exp(-abs(logit))
    value = 1 / (1 + small) if logit >= 0 else small / (1 + small)
    softplus = max(logit, 0.0) + math.log1p(small)
    return value, -softplus / math.log(gamma)
