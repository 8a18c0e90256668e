"""Values of keys that ``config.json`` may leave out: defaults of the configuration classes of Hugging Face transformers.

Releases 4 leave out ``tie_word_embeddings`` where it is the default, and all such keys inside ``text_config``. A key that is
null does not get its default.
"""

from __future__ import annotations

from typing import Any


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


_GEMMA: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
_GEMMA_2 = _GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_LATE = {"sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = _shape(32000, 4096, 14336, 32, 32, 8, 131072, eos_token_id=2, sliding_window=4096)
_QWEN_MOE = {"sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False}
_GRANITE = _shape(32000, 4096, 11008, 32, 32, None, 2048, eos_token_id=2) | {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _shape(32000, 4096, 11008, 32, 32, None, 2048, eos_token_id=2),
    "qwen2": _shape(151936, 4096, 22016, 32, 32, 32, 32768, **_LATE),
    "qwen3": _shape(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, **_LATE),
    "gemma": _shape(256000, 3072, 24576, 28, 16, 16, 8192, **_GEMMA),
    "gemma2": _shape(256000, 2304, 9216, 26, 8, 4, 8192, **_GEMMA_2)
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _shape(262208, 2304, 9216, 26, 8, 4, 131072, **_GEMMA_2)
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "phi3": _shape(32064, 3072, 8192, 32, 32, None, 4096, eos_token_id=32000, pad_token_id=32000)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "smollm3": _shape(128256, 2048, 11008, 36, 16, 4, 32768, eos_token_id=128001, pad_token_id=128004)
    | {"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "olmo2": _shape(50304, 4096, 11008, 32, 32, None, 2048, eos_token_id=50279, pad_token_id=1) | {"rms_norm_eps": 1e-5},
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
    "qwen2_5_vl": _shape(152064, 8192, 29568, 80, 64, 8, 32768, sliding_window=4096, max_window_layers=80)
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151645},
}
"""By ``model_type`` of the text model."""
