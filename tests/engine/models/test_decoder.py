"""The decoder against Hugging Face transformers, on random weights that the tests write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import FAMILIES, QUICK, TRAINED, VOCAB_SIZE, make_checkpoint
from tests.engine.models.causal import causal, causal_of
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.loader import load_model, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1},
    "all heads": {"num_key_value_heads": 4},
    "gqa 8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "narrow heads": {"head_dim": 8},
    "heads of 24": {"head_dim": 24},
    "wide": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "epsilon": {"rms_norm_eps": 0.1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn exact bounds": {"rope_parameters": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0}},
    "yarn attention factor": {"rope_parameters": YARN | {"attention_factor": 1.7}},
    "yarn mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "biases of attention": {"attention_bias": True},
}
OTHERS = [family for family in FAMILIES if family not in TRAINED]
OTHER_SHAPES = [
    *((family, "default") for family in OTHERS if family not in QUICK),
    *(
        (family, shape)
        for place, family in enumerate(OTHERS)
        for shape in (("tied", "narrow heads"), ("gqa 8", "heads of 24"), ("wide", "tied"))[place % 3]
        if family != "phi4_mini" or "heads" not in shape  # transformers derives the head's size
    ),
]
"""Each of the other families in its own shape and two more, in turn."""
OF_ONE_FAMILY = [shape for shape in SHAPES if shape not in ("default", "tied", "gqa 8", "narrow heads") and "bias" not in shape]
"""Shapes that a quick test gives to one family each: none of them has code of its own for these."""


def reference_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' logits in float32. [tokens, vocab]"""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def own_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(len(tokens)), causal_of(decoder.config)))


def some_tokens(count: int = 150) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, shape) for family in TRAINED for shape in ("default", "tied", "gqa 8", "narrow heads")),
        *((TRAINED[place % len(TRAINED)], shape) for place, shape in enumerate(OF_ONE_FAMILY)),
        ("llama", "biases"),
        ("qwen3", "biases of attention"),
        *((family, "default") for family in QUICK if family not in TRAINED),
        *(pytest.param(family, shape, marks=pytest.mark.slow) for family, shape in OTHER_SHAPES),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, shape: str) -> None:
    directory = make_checkpoint(tmp_path, family, **SHAPES[shape])
    expected = reference_logits(directory, some_tokens())
    assert expected.std() > 0.3  # random enough to tell right from wrong
    torch.testing.assert_close(own_logits(load_model(directory), some_tokens()), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "shape"),
    [*((family, "tied") for family in TRAINED), ("qwen3", "default"), ("llama", "llama3"), ("qwen2", "yarn mscale")],
)
def test_saved_model_is_read_by_transformers(tmp_path: Path, family: str, shape: str) -> None:
    decoder = load_model(make_checkpoint(tmp_path / "first", family, **SHAPES[shape]))
    save_model(decoder, decoder.config, tmp_path / "second")
    again = load_model(tmp_path / "second")
    assert again.config == decoder.config
    assert torch.equal(own_logits(again, some_tokens()), own_logits(decoder, some_tokens()))
    expected = reference_logits(tmp_path / "second", some_tokens())
    torch.testing.assert_close(own_logits(decoder, some_tokens()), expected, atol=1e-4, rtol=0)


def test_the_last_layer_computes_the_rows_that_are_read(tmp_path: Path) -> None:
    """These rows are those of the whole, and no product behind attention has others; keys and values are those of all tokens."""
    decoder = load_model(make_checkpoint(tmp_path, "qwen3")).requires_grad_(False)
    rows, last = torch.tensor([7, 2, 2]), decoder.layers[-1]
    inputs: dict[str, list[int]] = {}
    for layer in (decoder.layers[0], last):
        for name in ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            module = layer.get_submodule(name)
            told = inputs.setdefault(name, [])
            module.register_forward_hook(lambda _, given, __, told=told: told.append(len(given[0])))
    tokens = torch.arange(9) + 3
    attended: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended.append(len(k))
        return causal(layer, q, k, v)

    whole = decoder(tokens, torch.arange(9), causal)
    for told in inputs.values():
        told.clear()
    found = decoder(tokens, torch.arange(9), attend, rows)
    torch.testing.assert_close(found, whole[rows])
    assert attended == [9] * len(decoder.layers)
    assert inputs["attention.qkv_proj"] == [9, 9]
    assert inputs["attention.o_proj"] == inputs["mlp.gate_up_proj"] == inputs["mlp.down_proj"] == [9, 3]
