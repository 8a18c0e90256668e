"""Every feature that docs/models.md lists as not supported is refused with an error that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import parse_config
from engine.models.decoder import Decoder
from engine.models.files import ModelError
from engine.models.formats.int8 import check_shapes

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
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "other architectures": [
        ({"architectures": ["Glm4ForCausalLM"]}, "Glm4ForCausalLM .* is not supported; use .*LlamaForCausalLM")
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
    "quantised checkpoints": [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config in config.json is set, and quantised weights"),
    ],
    "images beside text": [
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"]},
            "architecture Qwen2VLForConditionalGeneration in config.json is not",
        ),
    ],
    "experts in int8": [
        (EXPERTS, "--quantize int8 does not support mixtures of experts such as Qwen3MoeForCausalLM; leave it out")
    ],
}


def load(raw: dict[str, Any]) -> None:
    """Run the checks of ``--quantize int8`` that precede the reading of weights."""
    check_shapes(Decoder(parse_config(raw)))


CASES = [pytest.param(*case, id=feature) for feature, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("changes", "problem"), CASES)
def test_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load(CONFIG | changes)


def test_the_document_lists_what_is_refused() -> None:
    _, _, text = DOCUMENT.read_text(encoding="utf-8").partition("Not supported, and refused by name:")
    table = text.strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [feature for feature, _, _ in rows] == list(REFUSED)
    for feature, _, named in rows:
        keys = re.findall("`([^`]+)`", named)
        problems = " ".join(problem for _, problem in REFUSED[feature])
        assert all(key in problems for key in keys), feature
