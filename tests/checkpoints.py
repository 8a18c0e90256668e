"""Model directories for tests: random weights written by Hugging Face transformers, and a byte-level tokeniser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel

TRAINED = ("llama", "qwen2", "qwen3")
"""Families that the project also trains and writes."""
_NAMES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "phi3": "Phi3",
    "phi4_mini": "Phi3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "seed_oss": "SeedOss",
    "exaone4": "Exaone4",
    "glm": "Glm",
    "glm4": "Glm4",
    "ernie4_5": "Ernie4_5",
    "granite": "Granite",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "granitemoe": "GraniteMoe",
    "granite4": "GraniteMoeHybrid",
}
"""First parts of the names of transformers' classes."""
_TEXT = {"gemma3": "Gemma3Text"}
"""Where transformers has another name for the classes of texts alone."""


def _class(family: str, suffix: str) -> Any:
    name = _TEXT.get(family, _NAMES[family]) if suffix != "ForCausalLM" else _NAMES[family]
    return getattr(transformers, name + suffix)


FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    family: (_class(family, "Config"), _class(family, "ForCausalLM")) for family in _NAMES
}
WITHOUT_CLASSIFIER = ("ernie4_5", "olmo2", "granite", "granitemoe", "granite4")
"""Families for which transformers has no class with a classification head."""
QUICK = (*TRAINED, "gemma2", "qwen2_moe")
"""Families that quick tests load; the others differ from them by fewer parts."""


def every(families: Iterable[str]) -> list[Any]:
    """Parameters for a test of all ``families``, of which those not in :data:`QUICK` are slow."""
    return [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in families]


CLASSIFIERS: dict[str, type[PreTrainedModel]] = {
    family: _class(family, "ForSequenceClassification") for family in _NAMES if family not in WITHOUT_CLASSIFIER
}
HEADLESS: dict[str, type[PreTrainedModel]] = {family: _class(family, "Model") for family in _NAMES}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3": {"sliding_window": 20, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    "mistral": {"sliding_window": 30},
    "ministral": {"sliding_window": 30, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"sliding_window": 40, "pad_token_id": 0},
    "phi4_mini": {
        "sliding_window": None,
        "pad_token_id": 0,
        "original_max_position_embeddings": 250,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6],
            "long_factor": [1.0, 1.5, 3.0, 6.0, 10.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0],
        },
    },
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "glm": {"pad_token_id": 0, "bos_token_id": 1},
    "glm4": {"pad_token_id": 0},
    "olmo3": {"sliding_window": 20, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": 20, "num_hidden_layers": 5},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 0.5},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granite4": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
}
"""Keys that make what is special about a family matter in a small model."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Ids 0 to 2; the 256 bytes and the words follow. ``<|im_end|>`` ends a generation."""
END_OF_TURN = 2
WORDS = ["Yes", "No", "the", "red", "blue", "shoes"]
"""One token each, alone and after a space."""
VOCAB_SIZE = 320
"""Rows of the head; more than the tokeniser has tokens, as real checkpoints are padded."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
}


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    model_class: type[PreTrainedModel] | None = None,
    **overrides: Any,
) -> Path:
    """Write a model of ``family`` (a key of :data:`FAMILIES`) with random weights, its configuration and its tokeniser.

    ``model_class``: one of :data:`CLASSIFIERS` or :data:`HEADLESS`; None writes a model with a language-model head. ``overrides``
    are keys of the configuration, over :data:`DEFAULTS` and :data:`OVERRIDES`. Weights are larger than transformers' own
    initialisation makes them and biases and norms are not trivial, so that a forgotten or misplaced tensor shows.
    Returns ``directory``.
    """
    config_class, causal_class = FAMILIES[family]
    model_class = model_class or causal_class
    values = _with_fitting_factors(DEFAULTS | OVERRIDES.get(family, {}) | overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**values))
        randomize(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Give ``model`` larger weights than its own initialisation does, and biases and norms that are not trivial."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.2)
        elif "norm" in name.lower():
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _with_fitting_factors(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with as many factors of LongRoPE as heads have angles."""
    rope = values.get("rope_parameters", {})
    angles = int(values["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    factors = {name: rope[name][:angles] for name in ("short_factor", "long_factor") if name in rope}
    return values | {"rope_parameters": rope | factors} if factors else values


def write_pooling(directory: Path, mode: str = "lasttoken", *, normalize: bool = True) -> Path:
    """Write the files of sentence-transformers beside a model, as releases before 5.4 do. Returns ``directory``."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, folder) in enumerate(zip(kinds, folders, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    names = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    pooling = {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": name == mode for name in names}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling | {"include_prompt": True}), encoding="utf-8")
    return directory


def write_tokenizer(directory: Path, special: Sequence[str] = SPECIAL_TOKENS, template: str = CHAT_TEMPLATE) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``: every byte is a token, with a few merges and a chat template.

    ``special``: special tokens, which begin as :data:`SPECIAL_TOKENS` does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, words = _merges()
    vocab = {token: index for index, token in enumerate([*special, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": SPECIAL_TOKENS[END_OF_TURN],
        "pad_token": SPECIAL_TOKENS[0],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _merges() -> tuple[list[tuple[str, str]], list[str]]:
    """The merges that build :data:`WORDS` letter by letter and then with a space (Ġ) before, and every token they make."""
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        merges += [(word[:end], word[end]) for end in range(1, len(word))] + [("Ġ", word)]
    return merges, [left + right for left, right in merges]
