"""Gemma 3 of 4B and more, Mistral Small 3, Ministral 3 and Qwen3-VL: the text model of a checkpoint for text and images."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.checkpoints import DEFAULTS, OVERRIDES, randomize, write_pooling, write_tokenizer
from tests.engine.models.causal import causal_of
from tests.engine.parity import some_tokens
from tests.engine.test_loop import run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config, parse_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.rope import LinearRope, Rope
from yardstick_llm.engine.settings import EngineSettings

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
NEWER_NAMES = (("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.language_model."), ("", "model."))
"""Beginnings of names in files, and as modules of releases from 4.52 on."""


YARN = {"type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LIMITED = {"rope_parameters": YARN | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}}
"""Rotation of Ministral 3."""
AXES = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
OTHERS = ("mistral3", "ministral3", "qwen3_vl")


def other(family: str) -> PreTrainedModel:
    """A small model of one of :data:`OTHERS`."""
    if family == "qwen3_vl":
        tower = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
        marks = {"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313}
        text = DEFAULTS | {"rope_parameters": AXES}
        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **marks)
        )
    text_config = (
        Ministral3Config(**DEFAULTS | LIMITED) if family == "ministral3" else MistralConfig(**DEFAULTS | {"sliding_window": None})
    )
    vision = PixtralVisionConfig(**VISION).to_dict()
    config = Mistral3Config(
        text_config=text_config.to_dict(), vision_config=vision, image_token_index=310, tie_word_embeddings=False
    )
    return Mistral3ForConditionalGeneration(config)


def write_other(directory: Path, family: str) -> PreTrainedModel:
    return saved(directory, 5, lambda: other(family))


def saved(directory: Path, seed: int, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Write the model that ``make`` returns, with random weights, and a tokeniser."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        randomize(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model.eval()


def write(directory: Path, **text: Any) -> PreTrainedModel:
    """Write a small random model; see :func:`~tests.checkpoints.make_checkpoint`."""
    values = DEFAULTS | OVERRIDES["gemma3"] | {"tie_word_embeddings": True} | text
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**values).to_dict(),
        vision_config=SiglipVisionConfig(**VISION).to_dict(),
        mm_tokens_per_image=4,
        image_token_index=310,
        tie_word_embeddings=values["tie_word_embeddings"],
    )
    return saved(directory, 4, lambda: Gemma3ForConditionalGeneration(config))


def rename(directory: Path) -> None:
    """Give tensors the names of modules."""
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        old, new = next((old, new) for old, new in NEWER_NAMES if name.startswith(old))
        tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def shorten(directory: Path) -> None:
    """Leave out keys of the text model that are defaults, as in published files."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    defaults = Gemma3TextConfig().to_dict()
    text = {key: value for key, value in config["text_config"].items() if key == "model_type" or value != defaults.get(key, "none")}
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        text.pop(key, None)
    config["text_config"] = text | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    if config.get("tie_word_embeddings"):
        del config["tie_word_embeddings"]
    path.write_text(json.dumps(config), encoding="utf-8")


def own_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    decoder = load_model(directory)
    return decoder.logits(decoder(tokens, torch.arange(len(tokens)), causal_of(decoder.config)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
@pytest.mark.parametrize("renamed", [False, True], ids=["names of files", "names of modules"])
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path: Path, renamed: bool, tied: bool) -> None:
    write(tmp_path, tie_word_embeddings=tied)
    shorten(tmp_path)
    if renamed:
        rename(tmp_path)
    model = Gemma3ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(own_logits(tmp_path, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", OTHERS)
@torch.inference_mode()
def test_logits_of_other_families_equal_transformers(tmp_path: Path, family: str) -> None:
    model = write_other(tmp_path, family)
    tokens = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(own_logits(tmp_path, tokens), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_body_of_text_and_images_is_read_without_its_head(tmp_path: Path) -> None:
    """As sentence-transformers saves a Qwen3-VL-Embedding."""
    model = write_other(tmp_path / "whole", "qwen3_vl").model
    model.save_pretrained(tmp_path)
    write_pooling(tmp_path)
    tokens = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(2))
    decoder = load_model(tmp_path)
    assert (decoder.config.architecture, decoder.config.lm_head) == ("Qwen3VLModel", False)
    found = decoder(tokens, torch.arange(len(tokens)), causal_of(decoder.config))
    torch.testing.assert_close(found, model(input_ids=tokens[None]).last_hidden_state[0], atol=1e-4, rtol=0)


def test_ministral_3_serves_its_original_context(tmp_path: Path) -> None:
    """Longer contexts have a scale of queries that is not computed."""
    write_other(tmp_path, "ministral3")
    assert load_config(tmp_path).max_context == 128
    with pytest.raises(ModelError, match="--max-context is 129, and the model has a context of 128; lower it"):
        load_config(tmp_path, max_context=129)


@pytest.mark.parametrize("family", ["gemma3", *OTHERS])
@pytest.mark.slow
@torch.inference_mode()
def test_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    """And scores, in steps of few tokens."""
    model = write(tmp_path) if family == "gemma3" else write_other(tmp_path, family)
    prompt = [token for token in some_tokens(random.Random(3), 60, 60) if token != 310]
    given = torch.tensor([prompt])
    options = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(prompt) :].tolist()
    loop = build_loop(EngineSettings(model=str(tmp_path), name="test", max_total_tokens=1024, max_batched_tokens=33))
    sampling = wire.Sampling(max_tokens=60, min_tokens=60, temperature=0.0)
    assert tokens_of(run(loop, wire.Generate("g", prompt, sampling)), "g") == expected
    (scored,) = run(loop, wire.Score("s", prompt, [[7, 9]], wire.Labels([5, 17])))
    row = model(torch.tensor([[*prompt, 7, 9]])).logits[0, -1].log_softmax(-1)[[5, 17]]
    torch.testing.assert_close(torch.tensor(scored.rows[0]), row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("audio_tower.weight", "have tensor audio_tower.weight, which the model has no place for"),
        ("language_model.model.layers.0.self_attn.extra.weight", "extra.weight, which the model has no place for"),
    ],
)
def test_only_the_tower_and_the_projector_are_left_unread(tmp_path: Path, name: str, problem: str) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert {key.split(".")[0] for key in tensors} == {"language_model", "vision_tower", "multi_modal_projector"}
    save_file(tensors | {name: torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=problem):
        load_model(tmp_path)


def test_published_configurations() -> None:
    """They name few keys of the text model; those of 4B the fewest."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    top = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    vision = {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14}
    config = parse_config(top | {"text_config": text, "vision_config": vision, "image_token_index": 262144})
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert config.attention_scale == 1 / 16
    assert (config.vocab_size, config.max_context, config.tied, config.vision) == (262208, 131072, True, None)
    assert (config.rope, config.local_rope) == (LinearRope(1e6, 8.0), Rope(1e4))
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.eos_token_ids == (1, 106)
