"""Values of ``config.json`` that differ between layers or scale them: windows, rotations, factors and experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.models.keys import Keys
from engine.models.registry import Family

SHARED_SIZE = "shared_expert_intermediate_size"
_SWITCHED = ("late", "switched", "early")
"""Values of :data:`~engine.models.registry.Windows` that ``use_sliding_window`` switches on."""


@dataclass(frozen=True)
class ExpertConfig:
    """Shape of a mixture of experts."""

    count: int
    chosen: int
    """Experts of each token."""
    size: int
    """Intermediate size of an expert."""
    renormalise: bool
    """The weights of a token's experts are divided by their sum."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have a feed-forward layer."""
    held: range | None = None
    """Experts that a process has, if several share them (``--expert-parallel``); None: all."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0 without one."""


def windows(keys: Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    """Read the window of each layer; return nothing if no layer has one."""
    on = family.windows not in _SWITCHED or keys.flag("use_sliding_window", False)
    window = keys.count("sliding_window") if on and keys.present("sliding_window") else None
    if keys.present("layer_types"):
        kinds = keys.strings("layer_types")
        if len(kinds) != layers:
            raise keys.error("layer_types", f"has {len(kinds)} entries, and num_hidden_layers is {layers}; correct the file")
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise keys.error("layer_types", f"asks for {unknown.pop()}, which is not supported; use another model")
        local = [kind == "sliding_attention" for kind in kinds]
        if window is None and any(local):
            raise keys.error("sliding_window", "is missing, and layer_types asks for it; correct the file")
    else:
        local = [_is_local(keys, family, layer, layers) for layer in range(layers)] if window is not None else []
    return tuple(window if is_local else None for is_local in local) if any(local) else ()


def _is_local(keys: Keys, family: Family, layer: int, layers: int) -> bool:
    """Whether ``layer`` has a window in a configuration without ``layer_types``."""
    if family.windows == "late":
        if "no_rope_layer_interval" in family.defaults:
            return layer in unrotated(keys, family, layers)
        return layer >= keys.count("max_window_layers", layers)
    if family.windows == "early":
        return layer % 2 == 0 and layer < keys.count("max_window_layers")
    if family.windows in ("all", "switched"):
        return True
    interval = 2 if family.windows == "alternate" else keys.count("sliding_window_pattern")
    return (layer + 1) % interval != 0


def unrotated(keys: Keys, family: Family, layers: int) -> tuple[int, ...]:
    """Read the layers without a rotation."""
    if "no_rope_layer_interval" not in family.defaults:
        return ()
    rotated = keys.flags("no_rope_layers")  # which names the layers that have one
    if rotated and len(rotated) != layers:
        raise keys.error("no_rope_layers", f"has {len(rotated)} entries, and num_hidden_layers is {layers}; correct the file")
    interval = keys.count("no_rope_layer_interval")
    return tuple(layer for layer in range(layers) if not (rotated[layer] if rotated else (layer + 1) % interval))


def factors(keys: Keys, family: Family, hidden_size: int) -> dict[str, Any]:
    """Read scales, soft caps and divisors, by their names in :class:`~engine.models.config.ModelConfig`."""
    factors: dict[str, Any] = {}
    if family.scaled_embeddings:
        factors["embedding_scale"] = math.sqrt(hidden_size)
    if "query_pre_attn_scalar" in family.defaults:
        factors["attention_scale"] = keys.number("query_pre_attn_scalar") ** -0.5
        for key, name in (("attn_logit_softcapping", "attention_cap"), ("final_logit_softcapping", "logit_cap")):
            if keys.present(key):
                factors[name] = keys.number(key)
    if family.multipliers:
        factors["embedding_scale"] = keys.number("embedding_multiplier")
        factors["attention_scale"] = keys.number("attention_multiplier")
        factors["residual_scale"] = keys.number("residual_multiplier")
        factors["logit_divisor"] = keys.number("logits_scaling")
    return factors


def experts(keys: Keys, family: Family, layers: int) -> ExpertConfig | None:
    """Read the shape of the experts; None for a dense model."""
    if family.experts is None:
        return None
    count = keys.count("num_local_experts" if keys.present("num_local_experts") else "num_experts")
    chosen = keys.count("num_experts_per_tok")
    if chosen > count:
        raise keys.error("num_experts_per_tok", f"is {chosen}, and there are {count} experts; correct the file")
    if family.experts != "qwen":
        return ExpertConfig(count, chosen, keys.count("intermediate_size"), renormalise=True, layers=tuple(range(layers)))
    dense, interval = keys.ids("mlp_only_layers"), keys.count("decoder_sparse_step", 1)
    return ExpertConfig(
        count,
        chosen,
        keys.count("moe_intermediate_size"),
        renormalise=keys.flag("norm_topk_prob", False),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % interval == 0),
        shared_size=keys.count(SHARED_SIZE) if SHARED_SIZE in family.defaults else 0,
    )
