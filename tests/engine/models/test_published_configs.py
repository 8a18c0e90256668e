"""Keys of published ``config.json`` files, in the forms in which releases 4 of Hugging Face transformers wrote them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoConfig

from tests.engine.models.test_class_defaults import assert_same


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, *others: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Keys of all dense models."""
    found = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    for each in (*others, more):
        found |= each
    return found


def base(theta: float, eps: float, **more: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rms_norm_eps": eps, "rope_scaling": None, "hidden_act": "silu"} | more


GEMMA = {
    "head_dim": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_bias": False, "mlp_bias": False}
OFF = {"use_sliding_window": False, "attention_bias": False}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": shape(
        2048, 8192, 16, 32, 8, 128256, 131072, base(500000.0, 1e-5, rope_scaling=LLAMA3), tie_word_embeddings=True, head_dim=64
    )
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": [128001, 128008, 128009]},
    "Qwen2.5 0.5B": shape(896, 4864, 24, 14, 2, 151936, 32768, base(1000000.0, 1e-6), tie_word_embeddings=True)
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32768, "max_window_layers": 21}
    | {"use_sliding_window": False, "eos_token_id": 151645},
    "Qwen3 0.6B": shape(1024, 3072, 28, 16, 8, 151936, 40960, base(1000000, 1e-6), OFF, tie_word_embeddings=True)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "sliding_window": None}
    | {"max_window_layers": 28, "eos_token_id": 151645},
    "Gemma 2B": shape(2048, 16384, 18, 8, 1, 256000, 8192, GEMMA)
    | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
    "Gemma 2 2B": shape(2304, 9216, 26, 8, 4, 256000, 8192, GEMMA)
    | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
    "Gemma 3 1B": shape(1152, 6912, 26, 4, 1, 262144, 32768, GEMMA)
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"}
    | {"query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000}
    | {"rope_local_base_freq": 10000, "rope_scaling": None, "eos_token_id": [1, 106]}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "Mistral 7B 0.3": shape(4096, 14336, 32, 32, 8, 32768, 32768, base(1000000.0, 1e-5), tie_word_embeddings=False)
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "eos_token_id": 2},
    "Phi-3-mini 4k": shape(3072, 8192, 32, 32, 32, 32064, 4096, base(10000.0, 1e-5), tie_word_embeddings=False)
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 2047, "eos_token_id": 32000}
    | {"original_max_position_embeddings": 4096, "pad_token_id": 32000, "attention_bias": False},
    "SmolLM3 3B": shape(2048, 11008, 36, 16, 4, 128256, 65536, base(5000000.0, 1e-6), OFF)
    | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4, "mlp_bias": False}
    | {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "sliding_window": None}
    | {"max_window_layers": 28, "eos_token_id": 128012, "pad_token_id": 128004},
    "OLMo 2 7B": shape(4096, 11008, 32, 32, 32, 100352, 4096, base(500000, 1e-6), tie_word_embeddings=False)
    | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "eos_token_id": 100257, "attention_bias": False},
    "Granite 3.1 2B": shape(2048, 8192, 40, 32, 8, 49155, 131072, base(5000000.0, 1e-5), GRANITE, tie_word_embeddings=True)
    | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.015625}
    | {"logits_scaling": 8.0, "eos_token_id": 0},
    "Granite 3.0 1B A400M": shape(1024, 512, 24, 16, 8, 49155, 4096, base(10000.0, 1e-6), GRANITE, tie_word_embeddings=True)
    | {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_multiplier": 0.015625}
    | {"logits_scaling": 6.0, "num_local_experts": 32, "num_experts_per_tok": 8, "eos_token_id": 0},
    "Qwen1.5 MoE A2.7B": shape(2048, 5632, 24, 16, 16, 151936, 8192, base(1000000.0, 1e-6), tie_word_embeddings=False)
    | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "use_sliding_window": False, "sliding_window": 32768}
    | {"max_window_layers": 21, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "norm_topk_prob": False, "eos_token_id": 151643},
    "Qwen3 30B A3B": shape(2048, 6144, 48, 32, 4, 151936, 40960, base(1000000.0, 1e-6), OFF, tie_word_embeddings=False)
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "sliding_window": None}
    | {"max_window_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "eos_token_id": 151645},
    "Mixtral 8x7B": shape(4096, 14336, 32, 32, 8, 32000, 32768, base(1000000.0, 1e-5), tie_word_embeddings=False)
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "eos_token_id": 2},
}
"""Facts of models, without keys that concern training only."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_dense_and_expert_models(model: str) -> None:
    written = PUBLISHED[model]
    given = copy.deepcopy({key: value for key, value in written.items() if key != "model_type"})
    assert_same(written, AutoConfig.for_model(written["model_type"], **given))
