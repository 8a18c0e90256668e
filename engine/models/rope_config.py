"""Rotary embeddings in ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.keys import Keys
from engine.models.registry import Family
from engine.models.rope import LinearRope, Llama3Rope, Rope, YarnRope, yarn_attention_factor


def parse_ropes(keys: Keys, family: Family) -> tuple[Rope, Rope | None]:
    """Read the rotation of the layers, and that of layers with a window if they have one of their own.

    Reads ``rope_parameters``, also with an object for each kind of layer, or the older ``rope_scaling`` beside ``rope_theta``.
    """
    inner = keys.section("rope_parameters") or keys.section("rope_scaling")
    if inner is None or inner.first_object() is None:
        local = None if family.local_theta is None else Rope(keys.number("rope_local_base_freq", family.local_theta))
        return _parse_rope(keys, inner, family.theta), local
    if family.local_theta is None:
        raise inner.error(inner.first_object() or "", "gives some layers a rotary embedding of their own, which is not supported")
    local = _parse_rope(keys, inner.section("sliding_attention"), family.local_theta)
    return _parse_rope(keys, inner.section("full_attention"), family.theta), local


def _parse_rope(keys: Keys, inner: Keys | None, default_theta: float) -> Rope:
    if inner is None:
        return Rope(keys.number("rope_theta", default_theta))
    theta = inner.number("rope_theta", keys.number("rope_theta", default_theta))
    refuse_partial_rotation(inner)
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind == "default":
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
    )


def refuse_partial_rotation(keys: Keys) -> None:
    """Raise :class:`ModelError` if only a part of each head is rotated."""
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.error("partial_rotary_factor", "is not 1, and rotating a part of each head is not supported; use another model")


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
    return {"rope_type": kind, **values, "original_max_position_embeddings": original}
