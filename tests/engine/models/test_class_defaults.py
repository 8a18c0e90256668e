"""Keys that ``config.json`` leaves out have the values that Hugging Face transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2_5_VLConfig

from engine.models.config import ModelConfig, parse_config
from engine.models.files import ModelError
from engine.models.loader import load_model
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.engine.models.causal import causal_of

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
        "o_bias": getattr(config, "attention_bias", False),
        "unrotated": tuple(layer for layer, turns in enumerate(getattr(config, "no_rope_layers", None) or []) if not turns),
        "experts": None,
    }
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
    [(family, {}) for family in FAMILIES]
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


HEADS = {"gemma": 16, "gemma2": 8, "gemma3": 8, "mistral": 8, "ministral": 8, "mixtral": 8, "smollm3": 8, "qwen3": 32, "qwen2": 32}
"""Attention heads with which the default number of key heads fits."""
EXPERTS = {"qwen2_moe": 60, "qwen3_moe": 128, "mixtral": 8, "granitemoe": 8}
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "moe_intermediate_size")


def of_defaults(family: str) -> dict[str, Any]:
    """Keys for a small model whose other values are defaults."""
    defaults = FAMILIES[family][0].default_config_fields()
    heads = HEADS.get(family, 4)
    values = {"num_attention_heads": heads, "head_dim": defaults.get("head_dim") or 16, "hidden_size": 64}
    values["num_key_value_heads"] = defaults.get("num_key_value_heads") or heads
    values["tie_word_embeddings"] = defaults["tie_word_embeddings"]
    for key in ("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rms_norm_eps"):
        if key in defaults:
            values[key] = defaults[key]
    if family in EXPERTS:
        values["num_local_experts" if family in ("mixtral", "granitemoe") else "num_experts"] = EXPERTS[family]
        values |= {"num_experts_per_tok": defaults["num_experts_per_tok"], "norm_topk_prob": False, "decoder_sparse_step": 1}
    if family == "qwen2_moe":
        values |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    if family == "smollm3":
        values["no_rope_layer_interval"] = 4
        values["num_hidden_layers"] = 4
    return values


def strip(directory: Path, family: str) -> set[str]:
    """Delete each key of ``config.json`` that has the value of the class, and return the keys.

    The padding token stays, because it has to be in the small vocabulary.
    """
    path = directory / "config.json"
    written = old_form(json.loads(path.read_text(encoding="utf-8")))
    defaults = old_form(complete(FAMILIES[family][0](pad_token_id=0), ""))
    gone = {
        key for key, value in written.items() if key not in (*KEPT, "pad_token_id") and key in defaults and value == defaults[key]
    }
    path.write_text(json.dumps({key: value for key, value in written.items() if key not in gone}), encoding="utf-8")
    return gone


QUICK = ("gemma", "gemma3", "smollm3", "mixtral", "qwen3")
"""Families whose classes have the most defaults."""


@pytest.mark.parametrize(
    "family",
    # phi4_mini has the class of phi3, and no default rotation
    [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES if family != "phi4_mini"],
)
@torch.inference_mode()
def test_logits_without_the_keys_that_are_defaults(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **of_defaults(family))
    gone = strip(tmp_path, family)
    assert {"rope_theta", "rms_norm_eps", "tie_word_embeddings"} < gone
    reference = FAMILIES[family][1].from_pretrained(tmp_path, dtype=torch.float32).eval()
    decoder = load_model(tmp_path)
    tokens = torch.randint(3, 320, (50,), generator=torch.Generator().manual_seed(1))
    hidden = decoder(tokens, torch.arange(50), causal_of(decoder.config))
    torch.testing.assert_close(decoder.logits(hidden), reference(tokens[None]).logits[0], atol=1e-4, rtol=1e-5)
