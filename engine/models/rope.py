"""Rotary frequencies and their published ways of scaling to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Plain rotary embedding, and the base of the scaled ones."""

    theta: float
    """Base of the geometric series of wavelengths."""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians a position, [head_dim / 2], float32. head_dim: elements of a head that are rotated."""
        return _plain_frequencies(self.theta, head_dim)

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        return 1.0


@dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by ``factor``: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation", arXiv 2306.15595."""

    factor: float

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        return _plain_frequencies(self.theta, head_dim) / self.factor


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths stretched by ``factor``, short ones kept, a linear blend between.

    Source: Hugging Face transformers, ``modeling_rope_utils.py``, rope type ``llama3``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    """Tokens of context before scaling."""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        plain = _plain_frequencies(self.theta, head_dim)
        rotations = self.original_context * plain / (2 * math.pi)  # rotations within the original context
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(plain / self.factor, plain, kept.clamp(0, 1))


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN: interpolation of slow dimensions, extrapolation of fast ones, a linear blend between, and warmer attention.

    Source: Peng et al. 2023, "YaRN", arXiv 2309.00071; option names as in Hugging Face transformers.
    """

    factor: float
    original_context: int
    """Tokens of context before scaling."""
    attention_factor: float
    """:attr:`amplitude`; :func:`yarn_attention_factor` gives the default."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this within the original context are kept."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are stretched by ``factor``."""
    truncate: bool = True
    """Round the bounds of the blend outwards to whole dimensions."""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        plain = _plain_frequencies(self.theta, head_dim)
        low, high = self._blend_bounds(head_dim)
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return torch.lerp(plain, plain / self.factor, stretched)

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    def _blend_bounds(self, head_dim: int) -> tuple[float, float]:
        """Indices of the frequencies at which stretching begins and is complete."""
        low, high = (self._index_of(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001

    def _index_of(self, turns: float, head_dim: int) -> float:
        """Return the (fractional) index of the frequency with this number of turns within the original context."""
        return head_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE: each wavelength is stretched by a factor of its own, of two sets: for the original context, and for longer ones.

    A model has one set for all sequences, because keys are kept: see :func:`engine.models.rope_config.parse_ropes`.
    Source: Ding et al. 2024, "LongRoPE", arXiv 2402.13753; option names as in Hugging Face transformers.
    """

    factors: tuple[float, ...]
    """[rotary_dim / 2] of the set that is used."""
    original_context: int
    """Tokens of context before scaling."""
    is_long: bool
    """Whether ``factors`` are those for longer contexts."""
    attention_factor: float
    """:attr:`amplitude`, for both sets; :func:`long_attention_factor` gives the default."""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * self.theta**exponents)

    @property
    def amplitude(self) -> float:
        return self.attention_factor


def long_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE's attention factor where the configuration gives none. ``factor``: longest context over the original one."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's attention factor where the configuration gives none (its equation 22; the quotient is DeepSeek's variant)."""

    def warmth(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return warmth(mscale) / warmth(mscale_all_dim) if mscale and mscale_all_dim else warmth(1.0)


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / theta**exponents
