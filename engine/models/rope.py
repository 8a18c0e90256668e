"""Rotary frequencies, their published ways of scaling to longer contexts, and how ``config.json`` names them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.registry import Family


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
class NtkRope(Rope):
    """The base of GTE's rotation times ``factor``, and wavelengths a little longer: the code that is published with
    ``Alibaba-NLP/gte-multilingual-base`` (``NTKScalingRotaryEmbedding``)."""

    factor: float

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        stretch: float = self.factor ** (2 / head_dim)
        return _plain_frequencies(self.theta * self.factor, head_dim) / stretch


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
    limited: bool = False
    """Queries beyond the original context have a scale of their own (Ministral 3), so longer contexts are not served."""

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

    A model has one set for all sequences, because keys are kept: see :func:`engine.models.rope.parse_ropes`.
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


@dataclass(frozen=True)
class FactorRope(Rope):
    """Each wavelength is stretched by a factor of its own: Llama 3's scaling, as GGUF files store it."""

    factors: tuple[float, ...]
    """[rotary_dim / 2]"""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        return _plain_frequencies(self.theta, head_dim) / torch.tensor(self.factors, dtype=torch.float32)


def frequencies_of(ropes: Sequence[Rope | None], head_dim: int) -> Tensor:
    """[ropes, head_dim / 2] radians a position, float32; 0 without a rotation."""
    with torch.device("cpu"):  # the first operation on the device `meta` imports 900 modules, in a second
        return torch.stack([torch.zeros(head_dim // 2) if rope is None else rope.inverse_frequencies(head_dim) for rope in ropes])


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


OLD_NAMES = ("su", "yarn")
"""Older names of ``longrope`` in configurations of Phi-3."""
FACTORS = "factors"
"""``rope_type`` of :class:`FactorRope`, in configurations that are made from GGUF files."""
LOCAL_THETA = "rope_local_base_freq"
"""Key of the base of the rotation in layers with a window. Where its default is None, that base is ``rope_theta`` (OLMo 3)."""


def parse_ropes(keys: Keys, family: Family, max_context: int | None = None) -> tuple[Rope, Rope | None]:
    """Read the rotation of the layers, and that of layers with a window if they have one of their own.

    Reads ``rope_parameters``, also with an object for each kind of layer, or the older ``rope_scaling`` beside ``rope_theta``.
    ``max_context``: the longest context that is asked for. LongRoPE has two sets of factors, and Hugging Face transformers chooses
    one by the length of each sequence. Kept keys are rotated by one set, so it is chosen here, once, as in vLLM: the set for
    longer contexts if ``max_context`` is longer than the original context.
    """
    inner = _parameters(keys)
    if inner is not None and family.partial_rotation and inner.first_object() is None:
        kind = inner.text("rope_type", inner.text("type", "default"))
        if kind == "longrope" or kind in OLD_NAMES:
            return _parse_long(keys, inner, family, max_context), None
    has_local = LOCAL_THETA in family.defaults
    if inner is None or inner.first_object() is None:
        local = Rope(keys.number(LOCAL_THETA, keys.number("rope_theta"))) if has_local else None
        return _parse_rope(keys, inner, plain="mrope" if family.vision else "default"), local
    if not has_local:
        raise inner.error(inner.first_object() or "", "gives some layers a rotary embedding of their own, which is not supported")
    local = _parse_rope(keys, inner.section("sliding_attention"), LOCAL_THETA)
    return _parse_rope(keys, inner.section("full_attention")), local


def longest_context(written: int, rope: Rope, wanted: int | None) -> int:
    """Return the context that is served, of at most ``written`` tokens, or what ``rope`` scales them to.

    YaRN checkpoints often keep the unscaled ``max_position_embeddings``; the scaled context is what YaRN is switched on for.

    A longer context than the original one costs LongRoPE accuracy in shorter ones, so it has to be ``wanted``.
    """
    most = max(written, round(rope.original_context * rope.factor)) if isinstance(rope, YarnRope) else written
    if isinstance(rope, YarnRope) and rope.limited:
        most = rope.original_context
    if wanted is None:
        return min(most, rope.original_context) if isinstance(rope, LongRope) else most
    if wanted > most:
        raise ModelError(f"--max-context is {wanted}, and the model has a context of {most}; lower it.")
    return wanted


def parse_sections(keys: Keys, head_dim: int) -> tuple[int, ...]:
    """Read how many frequencies turn by the time, the row and the column of a token (``mrope_section``)."""
    inner = keys.section("rope_parameters") or keys.section("rope_scaling")
    if inner is None:
        raise keys.error("rope_scaling", "is missing, and its mrope_section is needed; correct the file")
    sections = inner.ids("mrope_section")
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise inner.error("mrope_section", f"must be three numbers with the sum {head_dim // 2}; correct the file")
    return tuple(sections)


def _parse_rope(keys: Keys, inner: Keys | None, base: str = "rope_theta", plain: str = "default") -> Rope:
    """``base``: key of the base if ``inner`` has none. ``plain``: another name of an unscaled rotation."""
    own = None if inner is None else inner.optional_number("rope_theta")
    theta = own or keys.number(base, keys.optional_number("rope_theta"))
    if inner is None:
        return Rope(theta)
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind in ("default", plain):
        return Rope(theta)
    original = inner.count("original_max_position_embeddings", keys.count("max_position_embeddings"))
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            raise inner.error("high_freq_factor", "must be greater than low_freq_factor")
        return Llama3Rope(theta, inner.number("factor"), low, high, original)
    if kind == "linear":
        return LinearRope(theta, inner.number("factor"))
    if kind == "yarn":
        return _parse_yarn(inner, theta, original)
    if kind == FACTORS:
        return FactorRope(theta, tuple(inner.numbers("factors")))
    raise inner.error("rope_type", f"({kind}) is not supported; use default, linear, llama3 or yarn")


def _parse_yarn(keys: Keys, theta: float, original: int) -> YarnRope:
    factor = keys.number("factor")
    warmth = yarn_attention_factor(factor, keys.optional_number("mscale"), keys.optional_number("mscale_all_dim"))
    return YarnRope(
        theta,
        factor,
        original,
        attention_factor=keys.number("attention_factor", warmth),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        truncate=keys.flag("truncate", True),
        limited=keys.present("llama_4_scaling_beta"),
    )


def _parse_long(keys: Keys, inner: Keys, family: Family, max_context: int | None) -> LongRope:
    longest, original = keys.count("max_position_embeddings"), keys.count("original_max_position_embeddings")
    is_long = max_context is not None and max_context > original
    sets = {name: tuple(inner.numbers(name)) for name in ("short_factor", "long_factor")}
    for name, factors in sets.items():
        if (angles := rotary_dim(keys, family) // 2) != len(factors):
            raise inner.error(name, f"has {len(factors)} factors, and heads have {angles} angles; correct the file")
    return LongRope(
        inner.number("rope_theta", keys.number("rope_theta")),
        sets["long_factor" if is_long else "short_factor"],
        original,
        is_long,
        inner.number("attention_factor", long_attention_factor(inner.number("factor", longest / original), original)),
    )


def rotary_dim(keys: Keys, family: Family) -> int:
    """Read how many elements of a head are rotated. Raises :class:`~engine.models.files.ModelError`."""
    head_dim = keys.count("head_dim", keys.count("hidden_size") // keys.count("num_attention_heads"))
    key, dim = "partial_rotary_factor", head_dim
    inner = _parameters(keys)
    for place in (keys, *([] if inner is None else [inner, *inner.sections()])):
        if not place.present(key):
            continue
        factor = place.number(key)
        if factor != 1.0 and not family.partial_rotation:
            raise place.error(key, "is not 1, and rotating a part of each head is not supported; use another model")
        dim = int(head_dim * factor)
        if dim % 2 or not 2 <= dim <= head_dim:
            raise place.error(key, f"rotates {dim} of the {head_dim} elements of a head, but must rotate pairs; correct the file")
    return dim


def _parameters(keys: Keys) -> Keys | None:
    return keys.section("rope_parameters") or keys.section("rope_scaling")


def rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return what :func:`parse_ropes` reads, without the base."""
    if type(rope) is Rope:
        return None
    if isinstance(rope, LinearRope):
        return {"rope_type": "linear", "factor": rope.factor}
    values = dataclasses.asdict(rope)
    del values["theta"]
    original = values.pop("original_context")
    kind = "yarn" if isinstance(rope, YarnRope) else "llama3"
    values.pop("limited", None)
    return {"rope_type": kind, **values, "original_max_position_embeddings": original}
