"""Architectures that the one decoder covers: a body, and the head of its checkpoint.

Keys that ``config.json`` leaves out have the defaults of the configuration classes of Hugging Face transformers. Releases 4 leave
out ``tie_word_embeddings`` where it is the default, and all such keys inside ``text_config``. A key that is null does not get its
default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from yardstick_llm.engine.models.files import ModelError


def _shape(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    context: int,
    **others: Any,
) -> dict[str, Any]:
    """``kv_heads`` None: as many as ``heads``."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    } | others


_GEMMA_VALUES: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
_GEMMA_2_VALUES = _GEMMA_VALUES | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_LATE = {"sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = _shape(32000, 4096, 14336, 32, 32, 8, 131072, eos_token_id=2, sliding_window=4096)
_QWEN_MOE = {"sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False}
_GLM = _shape(151552, 4096, 13696, 40, 32, 2, 131072, head_dim=128, pad_token_id=151329) | {
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "attention_out_bias": False,
    "eos_token_id": [151329, 151336, 151338],
}
_GRANITE = _shape(32000, 4096, 11008, 32, 32, None, 2048, eos_token_id=2) | {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _shape(32000, 4096, 11008, 32, 32, None, 2048, eos_token_id=2),
    "eurobert": _shape(128256, 768, 3072, 12, 12, None, 8192, eos_token_id=128001, pad_token_id=128001) | {"rms_norm_eps": 1e-5},
    "qwen2": _shape(151936, 4096, 22016, 32, 32, 32, 32768, **_LATE),
    "qwen3": _shape(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, **_LATE),
    "gemma": _shape(256000, 3072, 24576, 28, 16, 16, 8192, **_GEMMA_VALUES),
    "gemma2": _shape(256000, 2304, 9216, 26, 8, 4, 8192, **_GEMMA_2_VALUES)
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _shape(262208, 2304, 9216, 26, 8, 4, 131072, **_GEMMA_2_VALUES)
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "phi3": _shape(32064, 3072, 8192, 32, 32, None, 4096, eos_token_id=32000, pad_token_id=32000)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "smollm3": _shape(128256, 2048, 11008, 36, 16, 4, 32768, eos_token_id=128001, pad_token_id=128004)
    | {"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "olmo2": _shape(50304, 4096, 11008, 32, 32, None, 2048, eos_token_id=50279, pad_token_id=1) | {"rms_norm_eps": 1e-5},
    "olmo3": _shape(50304, 4096, 11008, 32, 32, None, 2048, eos_token_id=50279, pad_token_id=1, sliding_window=4096)
    | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": None, "sliding_window_pattern": 4},
    "seed_oss": _shape(155136, 4096, 27648, 64, 80, 8, 524288, eos_token_id=2, pad_token_id=1, head_dim=128)
    | {"attention_bias": True, "attention_out_bias": False},
    "exaone4": _shape(102400, 4096, 16384, 32, 32, 32, 2048, eos_token_id=2)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "glm": _GLM,
    "glm4": _GLM,
    "ernie4_5": _shape(103424, 1024, 3072, 18, 16, 2, 131072, eos_token_id=2, pad_token_id=0, head_dim=128)
    | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "use_bias": False},
    "granite": _GRANITE,
    "qwen2_moe": _shape(151936, 2048, 5632, 24, 16, 16, 32768, **_QWEN_MOE)
    | {
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": _shape(151936, 2048, 6144, 24, 32, 4, 32768, **_QWEN_MOE)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "mixtral": _MISTRAL
    | {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": _GRANITE | {"num_local_experts": 8, "shared_intermediate_size": 1024, "position_embedding_type": None},
    "qwen3_vl_text": _shape(151936, 4096, 22016, 32, 32, 32, 128000, head_dim=128, rope_theta=5e5),
    "qwen2_5_vl": _shape(152064, 8192, 29568, 80, 64, 8, 32768, sliding_window=4096, max_window_layers=80)
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151645},
}
"""By ``model_type`` of the text model."""


Head = Literal["lm", "classes", "none"]
"""``lm``: logits of the next token; ``classes``: logits of a few classes, or a reward; ``none``: hidden states alone."""
Norms = Literal["before", "after", "around"]
"""Place of a layer's norms: before attention and MLP, after them, or both. Norms after them precede the sum with the residual."""
ExpertNames = Literal["qwen", "mixtral", "granite"]
"""Names of experts in configurations and checkpoints."""
Windows = Literal["late", "all", "alternate", "pattern", "switched", "early"]
"""Layers with a sliding window if the configuration has no ``layer_types``. If ``use_sliding_window`` is set: ``late``: those from
``max_window_layers`` on, ``switched``: all, ``early``: every other one from the first, below ``max_window_layers``. Without such a
switch: all, every other one from the first, or (``pattern``) all but each ``sliding_window_pattern``-th."""


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
    fused_mlp: bool = False
    """The checkpoint stores one projection for gate and up, and three for queries, keys and values."""
    windows: Windows = "late"
    interleaved: bool = False
    """Neighbouring elements of a head are rotated as a pair, not those half of a head apart."""
    unrotated_global: bool = False
    """Where ``sliding_window`` is set, layers without a window have no rotation."""
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
    bidirectional: bool = False
    """All tokens attend to each other, and the classification head reads the mean of all hidden states."""
    class_inner: bool = False
    """The classification head has an inner layer, and the configuration says what it reads."""
    head: Head = "lm"

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of keys that the configuration leaves out."""
        return DEFAULTS[self.model_type]


_GEMMA = Family("gemma", norms_add_one=True, gelu=True, scaled_embeddings=True)
_GEMMA_2 = dataclasses.replace(_GEMMA, model_type="gemma2", norms="around", windows="alternate")
_GEMMA_3 = dataclasses.replace(_GEMMA, model_type="gemma3_text", norms="around", qk_norm=True, windows="pattern")
_QWEN_3_VL = Family("qwen3_vl_text", qk_norm=True, nested=True, unread=("visual.",))

BODIES: dict[str, Family] = {
    "Llama": Family("llama"),
    "LlamaBidirectional": Family("llama", bidirectional=True),
    "EuroBert": Family("eurobert", bidirectional=True, class_inner=True),
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
    "Olmo3": Family("olmo3", qk_norm_over_heads=True, norms="after", windows="pattern"),
    "SeedOss": Family("seed_oss"),
    "Exaone4": Family("exaone4", qk_norm=True, norms="after", windows="pattern", unrotated_global=True),
    "Glm": Family("glm", fused_mlp=True, interleaved=True, partial_rotation=True),
    "Glm4": Family("glm4", norms="around", fused_mlp=True, interleaved=True, partial_rotation=True),
    "Ernie4_5": Family("ernie4_5", interleaved=True),
    "Granite": Family("granite", multipliers=True),
    "Qwen2Moe": Family("qwen2_moe", qkv_bias_only=True, windows="early", experts="qwen"),
    "Qwen3Moe": Family("qwen3_moe", qk_norm=True, windows="switched", experts="qwen"),
    "Mixtral": Family("mixtral", windows="all", experts="mixtral"),
    "GraniteMoeHybrid": Family("granitemoehybrid", multipliers=True, fused_mlp=True),
    "GraniteMoe": Family("granitemoe", multipliers=True, experts="granite"),
}
"""First part of an architecture's name. To add a model that differs by these flags only, add a line."""

HEADS: dict[str, Head] = {"ForCausalLM": "lm", "ForSequenceClassification": "classes", "Model": "none"}
"""Second part of an architecture's name."""
_ABSENT = {"Gemma3ForSequenceClassification", "Gemma3Model", "LlamaBidirectionalForCausalLM", "EuroBertForCausalLM"}
"""Names that Hugging Face transformers gives to models of text and images, whose text models have others, and names that no model
has. They are refused."""

FAMILIES: dict[str, Family] = {
    body + suffix: dataclasses.replace(family, head=head)
    for body, family in BODIES.items()
    for suffix, head in HEADS.items()
    if body + suffix not in _ABSENT
} | {
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        _GEMMA_3, nested=True, unread=("vision_tower.", "multi_modal_projector.")
    ),
    "Mistral3ForConditionalGeneration": dataclasses.replace(
        BODIES["Mistral"], nested=True, unread=("vision_tower.", "multi_modal_projector.")
    ),
    "Qwen3VLForConditionalGeneration": _QWEN_3_VL,
    "Qwen3VLModel": dataclasses.replace(_QWEN_3_VL, head="none"),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", qkv_bias_only=True, nested=True, vision=True),
}
"""All supported architectures, by their names in ``config.json``."""


def family_of(architecture: str) -> Family:
    """Return the flags of ``architecture``. Raises :class:`ModelError` if it is not in :data:`FAMILIES`."""
    family = FAMILIES.get(architecture)
    if family is None:
        from yardstick_llm.engine.models import encoder_config  # which imports this module

        raise ModelError(
            f"The architecture {architecture:.80} in config.json is not supported; use a decoder ({_bodies(FAMILIES)}) or an "
            f"encoder ({_bodies(encoder_config.NAMED)}), with a head that docs/models.md lists."
        )
    return family


def _bodies(architectures: Iterable[str]) -> str:
    """First parts of the names, each once."""
    return ", ".join(dict.fromkeys(re.sub("(For[A-Z].*|Model)$", "", name) for name in architectures))
