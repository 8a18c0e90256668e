"""The tower against Hugging Face transformers, and its configuration and weights as checkpoints have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from tests.engine.vision.models import Reference, make_vision_checkpoint, picture, processor, some_image
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import load_config, parse_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import fingerprint, load_model
from yardstick_llm.engine.models.vision.config import Preprocessing
from yardstick_llm.engine.models.vision.tower import VisionTower, grid_of

SHAPES = [(2, 2), (2, 30), (8, 8), (10, 8), (8, 10), (22, 26)]
"""Rows and columns of patches: below a window, exactly one and two windows, and windows cut at each edge."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def tower(checkpoint: Path) -> VisionTower:
    return load_model(checkpoint).tower


def embed(tower: VisionTower, *images: wire.Image) -> torch.Tensor:
    """[images, tokens, size]"""
    config = tower.config
    pixels = torch.stack([torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(-1, 588) for image in images])
    return tower(pixels, grid_of(images[0].rows, images[0].columns, config.merge_size, config.window))


@torch.inference_mode()
def expected(reference: Reference, image: wire.Image) -> torch.Tensor:
    made = processor()(picture(image), do_resize=False, return_tensors="pt", input_data_format="channels_first")
    return reference.model.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"]).pooler_output


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_equal_transformers(shape: tuple[int, int], tower: VisionTower, reference: Reference) -> None:
    image = some_image(1, *shape)
    torch.testing.assert_close(embed(tower, image)[0], expected(reference, image), atol=2e-5, rtol=1e-5)


def test_images_of_one_size_are_computed_together(tower: VisionTower, reference: Reference) -> None:
    images = [some_image(seed, 10, 12) for seed in range(3)]
    found = embed(tower, *images)
    for image, rows in zip(images, found, strict=True):
        torch.testing.assert_close(rows, expected(reference, image), atol=2e-5, rtol=1e-5)


def test_cudnn_computes_no_attention(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would build a plan for each shape."""
    allowed = []

    def attend(*given: torch.Tensor) -> torch.Tensor:
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return scaled_dot_product_attention(*given)

    monkeypatch.setattr("yardstick_llm.engine.models.vision.tower.scaled_dot_product_attention", attend)
    embed(tower, some_image(1, 4, 4))
    assert set(allowed) == {(False, True)}
    assert torch.backends.cuda.cudnn_sdp_enabled(), "elsewhere it may"


@pytest.mark.parametrize("names", ["model.language_model. model.visual.", "language_model.model. visual."])
def test_names_of_newer_checkpoints(names: str, checkpoint: Path, tower: VisionTower, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    weights = load_file(checkpoint / "model.safetensors")
    text, visual = names.split()
    renamed = {name.replace("model.", text, 1).replace("visual.", visual, 1): value for name, value in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    found = load_model(tmp_path / "m")
    image = some_image(4, 4, 4)
    assert torch.equal(embed(found.tower, image), embed(tower, image))


def published(checkpoint: Path) -> dict:
    """The configuration as early releases wrote it: keys of the text beside the others."""
    raw = json.loads((checkpoint / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["layer_types"], raw["dtype"]
    vision = raw["vision_config"] | {"in_chans": 3}
    del vision["rope_parameters"], vision["in_channels"]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return text | raw | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "vision_config": vision}


def test_configurations_of_both_forms(checkpoint: Path) -> None:
    flat = published(checkpoint)
    found = load_config(checkpoint)
    assert parse_config(flat).rope_sections == found.rope_sections == (2, 3, 3)
    assert parse_config(flat) == parse_config(json.loads((checkpoint / "config.json").read_text()))
    newer = flat | {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}}
    assert parse_config(newer) == parse_config(flat)
    assert found.vision.window == 4
    assert found.vision.preprocessing == Preprocessing()
    tied = flat | {"text_config": {"tie_word_embeddings": True}}
    assert parse_config(tied).tied


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, "mrope_section .* three numbers with the sum 8"),
        ({"rope_scaling": {"type": "longrope", "mrope_section": [2, 3, 3]}}, "rope_type .*longrope"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "Qwen2VLForConditionalGeneration .* not supported"),
        ({"image_token_id": 1000}, "image_token_id .* not in the vocabulary"),
        ({"vision_config": None}, "vision_config .* missing"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act .* not supported"),
        ({"vision_config": {"in_chans": 4}}, "3 channels"),
        ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size .* is 32"),
        ({"vision_config": {"window_size": 20}}, "window_size .* smaller than a merged patch"),
        ({"vision_config": {"num_heads": 3}}, "multiple of 4 times num_heads"),
    ],
)
def test_configurations_that_are_refused(changes: dict, problem: str, checkpoint: Path) -> None:
    raw = published(checkpoint)
    vision = changes.get("vision_config", {})
    changes = changes | ({"vision_config": raw["vision_config"] | vision} if vision else {})
    with pytest.raises(ModelError, match=problem):
        parse_config(raw | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"do_normalize": False}, "do_normalize .* not supported"),
        ({"resample": 2}, "resample .* not 3"),
        ({"patch_size": 16}, "patch_size .* not 14"),
        ({"image_mean": [0.5]}, "image_mean .* list of 3 numbers"),
    ],
)
def test_processors_that_are_refused(changes: dict, problem: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=problem):
        load_config(tmp_path / "m")


def test_constants_of_the_processor_count_in_the_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m")
    assert fingerprint(tmp_path / "m", torch.float32) == fingerprint(checkpoint, torch.float32)
    path = tmp_path / "m" / "preprocessor_config.json"
    constants = {"image_mean": [0.5, 0.5, 0.5], "size": {"shortest_edge": 784, "longest_edge": 7840}}
    inner = json.loads(path.read_text()) | constants
    path.unlink()
    (tmp_path / "m" / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    found = load_config(tmp_path / "m").vision.preprocessing
    assert found == Preprocessing(mean=(0.5, 0.5, 0.5), rescale=1 / 255, min_pixels=784, max_pixels=7840)
    assert fingerprint(tmp_path / "m", torch.float32) != fingerprint(checkpoint, torch.float32)
