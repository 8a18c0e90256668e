"""Architectures that the one decoder covers: a body, and the head of its checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from engine.models.class_defaults import DEFAULTS
from engine.models.errors import ModelError

Head = Literal["lm", "classes", "none"]
"""``lm``: logits of the next token; ``classes``: logits of a few classes, or a reward; ``none``: hidden states alone."""
Norms = Literal["before", "after", "around"]
"""Place of a layer's norms: before attention and MLP, after them, or both. Norms after them precede the sum with the residual."""
ExpertNames = Literal["qwen", "mixtral", "granite"]
"""Names of experts in configurations and checkpoints."""
Windows = Literal["late", "all", "alternate", "five_of_six", "switched", "early"]
"""Layers with a sliding window if the configuration has no ``layer_types``. If ``use_sliding_window`` is set: ``late``: those from
``max_window_layers`` on, ``switched``: all, ``early``: every other one from the first, below ``max_window_layers``. Without such a
switch: all, every other one from the first, or all but each sixth (or ``sliding_window_pattern``-th)."""


@dataclass(frozen=True)
class Family:
    """Flags of an architecture."""

    model_type: str
    """``model_type`` of the Hugging Face configuration."""
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    qk_norm_over_heads: bool = False
    """Queries are normalised over all heads together before the rotation, and so are keys."""
    qkv_bias_only: bool = False
    """Query, key and value projections always have a bias and the output projection never; otherwise the configuration's
    ``attention_bias`` decides for all four."""
    norms: Norms = "before"
    norms_add_one: bool = False
    """Norms multiply by ``1 + weight``."""
    gelu: bool = False
    """The gate of the MLP is GELU, approximated by tanh, and not SiLU."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    fused_projections: bool = False
    """The checkpoint stores one projection for queries, keys and values, and one for gate and up."""
    windows: Windows = "late"
    partial_rotation: bool = False
    """``partial_rotary_factor`` of each head may be rotated, and the rotation may be LongRoPE, whose old names are ``su`` and
    ``yarn``."""
    multipliers: bool = False
    """The configuration has factors of embeddings, attention, residuals and logits."""
    experts: ExpertNames | None = None
    """A router chooses a few experts for each token in place of the feed-forward layer."""
    nested: bool = False
    """The configuration of the text model may be in ``text_config``."""
    vision: bool = False
    """A tower embeds images, and positions of their tokens have three axes (Qwen2.5-VL)."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not loaded: of a tower whose images are not supported."""
    head: Head = "lm"

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of keys that the configuration leaves out."""
        return DEFAULTS[self.model_type]


_GEMMA = Family("gemma", norms_add_one=True, gelu=True, scaled_embeddings=True)
_GEMMA_2 = dataclasses.replace(_GEMMA, model_type="gemma2", norms="around", windows="alternate")
_GEMMA_3 = dataclasses.replace(_GEMMA, model_type="gemma3_text", norms="around", qk_norm=True, windows="five_of_six")

BODIES: dict[str, Family] = {
    "Llama": Family("llama"),
    "Qwen2": Family("qwen2", qkv_bias_only=True),
    "Qwen3": Family("qwen3", qk_norm=True),
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA_2,
    "Gemma3": _GEMMA_3,
    "Gemma3Text": _GEMMA_3,
    "Mistral": Family("mistral", windows="all"),
    "Ministral": Family("ministral", windows="all"),
    "Phi3": Family("phi3", fused_projections=True, windows="all", partial_rotation=True),
    "SmolLM3": Family("smollm3"),
    "Olmo2": Family("olmo2", qk_norm_over_heads=True, norms="after"),
    "Granite": Family("granite", multipliers=True),
    "Qwen2Moe": Family("qwen2_moe", qkv_bias_only=True, windows="early", experts="qwen"),
    "Qwen3Moe": Family("qwen3_moe", qk_norm=True, windows="switched", experts="qwen"),
    "Mixtral": Family("mixtral", windows="all", experts="mixtral"),
    "GraniteMoe": Family("granitemoe", multipliers=True, experts="granite"),
}
"""First part of an architecture's name. To add a model that differs by these flags only, add a line."""

HEADS: dict[str, Head] = {"ForCausalLM": "lm", "ForSequenceClassification": "classes", "Model": "none"}
"""Second part of an architecture's name."""
_MULTIMODAL = {"Gemma3ForSequenceClassification", "Gemma3Model"}
"""Names that Hugging Face transformers gives to models of text and images, whose text models have others. They are refused."""

FAMILIES: dict[str, Family] = {
    body + suffix: dataclasses.replace(family, head=head)
    for body, family in BODIES.items()
    for suffix, head in HEADS.items()
    if body + suffix not in _MULTIMODAL
} | {
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        _GEMMA_3, nested=True, unread=("vision_tower.", "multi_modal_projector.")
    ),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", qkv_bias_only=True, nested=True, vision=True),
}
"""All supported architectures, by their names in ``config.json``."""


def family_of(architecture: str) -> Family:
    """Return the flags of ``architecture``. Raises :class:`ModelError` if it is not in :data:`FAMILIES`."""
    family = FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"The architecture {architecture} in config.json is not supported; use a model with one of: {supported}.")
    return family
