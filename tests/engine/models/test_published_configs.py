"""Configurations as they are published: complete ones, without the keys that are defaults, and those that are refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig, Qwen2_5_VLConfig

from tests.checkpoints import FAMILIES
from yardstick_llm.engine.models.config import ModelConfig, parse_config
from yardstick_llm.engine.models.files import ModelError


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
OLMO3 = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
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
    "OLMo 3 7B": shape(4096, 11008, 32, 32, 32, 100278, 65536, base(500000, 1e-6, rope_scaling=OLMO3), tie_word_embeddings=False)
    | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "eos_token_id": 100257, "attention_bias": False}
    | {"sliding_window": 4096, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "pad_token_id": 100277},
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


KEPT = ("architectures", "model_type")


def complete(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """Every key of a configuration."""
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}


def old_form(written: dict[str, Any]) -> dict[str, Any]:
    """``written`` as releases 4 write it: the base beside the other values of the rotation, and no keys of release 5."""
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    rope = dict(written["rope_parameters"])
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "num_local_experts" in old and written["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return old | {"torch_dtype": "bfloat16"}


def facts(config: PreTrainedConfig) -> dict[str, Any]:
    """What transformers makes of a configuration, by its names in :class:`~engine.models.config.ModelConfig`."""
    layers, rope = config.num_hidden_layers, config.rope_parameters
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds) if window else ()
    found = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "norm_eps": config.rms_norm_eps,
        "tied": config.tie_word_embeddings,
        "theta": rope.get("full_attention", rope)["rope_theta"],
        "local_theta": rope["sliding_attention"]["rope_theta"] if "sliding_attention" in rope else None,
        "windows": windows if any(windows) else (),
        "attention_cap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "logit_cap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "o_bias": config.model_type not in ("glm", "glm4")
        and getattr(config, "attention_out_bias", getattr(config, "attention_bias", False)),
        "unrotated": tuple(layer for layer, turns in enumerate(getattr(config, "no_rope_layers", None) or []) if not turns),
        "experts": None,
    }
    if config.model_type == "exaone4" and window:
        found["unrotated"] = tuple(layer for layer in range(layers) if windows[layer] is None)
    if hasattr(config, "num_experts_per_tok"):
        found["experts"] = (getattr(config, "num_experts", None) or config.num_local_experts, config.num_experts_per_tok)
    if hasattr(config, "query_pre_attn_scalar"):
        found["attention_scale"] = config.query_pre_attn_scalar**-0.5
    if hasattr(config, "logits_scaling"):
        found |= {"attention_scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        found |= {"residual_scale": config.residual_multiplier, "logit_divisor": config.logits_scaling}
    return found


def own_facts(config: ModelConfig) -> dict[str, Any]:
    """:func:`facts` of a configuration as it was parsed."""
    local = None if config.local_rope is None else config.local_rope.theta
    experts = None if config.experts is None else (config.experts.count, config.experts.chosen)
    return vars(config) | {"theta": config.rope.theta, "local_theta": local, "experts": experts}


def assert_same(written: dict[str, Any], reference: PreTrainedConfig) -> None:
    found, expected = own_facts(parse_config(written)), facts(reference)
    assert {key: found[key] for key in expected} == expected


SWITCHED = {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "given"),
    [(family, {}) for family in FAMILIES if family != "granite4"]  # whose defaults are not dense
    + [(family, SWITCHED) for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")]
    + [("smollm3", SWITCHED | {"sliding_window": 64})],
)
def test_every_key_may_be_left_out(family: str, given: dict[str, Any]) -> None:
    """One at a time, all at once, and in the form of releases 4."""
    config_class, model_class = FAMILIES[family]
    reference = config_class(**given)
    written = complete(reference, model_class.__name__)
    for form in (written, old_form(written)):
        assert_same(form, reference)
        whole = parse_config(form)
        for key in form:
            if key not in (*KEPT, *given):
                assert parse_config({name: value for name, value in form.items() if name != key}) == whole, key
        assert parse_config({key: form[key] for key in (*KEPT, *given)}) == whole


def test_every_key_of_text_and_tower_may_be_left_out() -> None:
    reference = Qwen2_5_VLConfig(
        text_config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, tie_word_embeddings=False
    )
    written = complete(reference, "Qwen2_5_VLForConditionalGeneration")
    written["vision_config"]["out_hidden_size"] = 8192
    whole, text = parse_config(written), written["text_config"]
    for key in text:
        if key not in ("rope_parameters", "model_type"):
            less = {name: value for name, value in text.items() if name != key}
            assert parse_config(written | {"text_config": less}) == whole, key
    for key in (tower := written["vision_config"]):
        if key != "out_hidden_size":
            less = {name: value for name, value in tower.items() if name != key}
            assert parse_config(written | {"vision_config": less}) == whole, key
    assert parse_config({key: value for key, value in written.items() if key != "image_token_id"}) == whole
    # as release 4.57 writes it
    moved = {"text_config": text | {"architectures": written["architectures"]}, "architectures": None}
    assert parse_config(written | moved) == whole
    foreign = {"text_config": text | {"architectures": ["LlamaForCausalLM"]}, "architectures": None}
    with pytest.raises(ModelError, match=r"architectures is missing from config\.json"):
        parse_config(written | foreign)


DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "other architectures": [
        (
            {"architectures": ["Cohere2ForCausalLM"]},
            "Cohere2ForCausalLM .* is not supported; use a decoder .Llama, .* encoder .Bert, ",
        ),
        (
            {"architectures": ["BartForSequenceClassification"]},
            r"^The architecture BartForSequenceClassification in config.json (?!.*For)[^;]*; [^;]{,300}Qwen2_5_VL[^;]{,250}$",
        ),
    ],
    "`longrope`, `dynamic` and other rotations": [
        ({"rope_scaling": LONGROPE}, r"rope_type .* \(longrope\) is not supported; use default"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type .* \(dynamic\) is not supported"),
    ],
    "rotation of a part of each head": [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json is not 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor in rope_parameters"),
    ],
    "rotations for each kind of layer": [
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "sliding_attention in rope_parameters"),
    ],
    "attention to later tokens": [
        ({"is_causal": False}, "is_causal in config.json asks for attention to later tokens"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json asks for attention to later tokens"),
    ],
    "chunked and linear attention": [
        ({"layer_types": ["full_attention", kind]}, f"layer_types in config.json asks for {kind}, which is not supported")
        for kind in ("chunked_attention", "linear_attention")
    ],
    "other activations": [
        ({"hidden_act": "relu2"}, "hidden_act in config.json is not supported; only silu is"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "hidden_activation .* only gelu_pytorch_tanh is"),
    ],
    "images beside text": [
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"]},
            "architecture Qwen2VLForConditionalGeneration in config.json is not",
        ),
    ],
}


CASES = [pytest.param(*case, id=feature) for feature, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("changes", "problem"), CASES)
def test_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse_config(CONFIG | changes)


def test_the_document_lists_what_is_refused() -> None:
    _, _, text = DOCUMENT.read_text(encoding="utf-8").partition("Not supported, and refused by name:")
    table = text.strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [feature for feature, _, _ in rows] == list(REFUSED)
    for feature, _, named in rows:
        keys = re.findall("`([^`]+)`", named)
        problems = " ".join(problem for _, problem in REFUSED[feature])
        assert all(key in problems for key in keys), feature
