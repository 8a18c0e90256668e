"""LoRA adapters of a Qwen2.5-VL's language model, beside images, against merged weights in transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.engine.adapters import ALL, merge, write_adapter
from tests.engine.lenvm.writing import run
from tests.engine.vision.models import Reference, make_vision_checkpoint, shown, some_image, some_text
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.settings import EngineSettings

# PEFT asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LABELS = [5, 17, 300]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("model"))


def build(checkpoint: Path, *adapters: Path, **settings: Any) -> Loop:
    lora = [f"{path.name}={path}" for path in adapters]
    return build_loop(EngineSettings(model=str(checkpoint), name="test", max_total_tokens=2048, lora=lora, **settings))


@pytest.mark.slow
def test_images_and_text_equal_merged_weights(checkpoint: Path, tmp_path: Path) -> None:
    """One image in the prompts of the base model and of all adapters, in mixed steps; its embedding is computed once."""
    kinds: list[dict[str, Any]] = [{}, {"targets": ("q_proj", "down_proj"), "rank": 7}, {"whole": ("lm_head", "embed_tokens")}]
    references = [Reference(checkpoint) for _ in range(4)]
    adapters = [write_adapter(tmp_path / f"a{seed}", references[0].model, seed=seed, **kind) for seed, kind in enumerate(kinds)]
    for reference, adapter in zip(references[1:], adapters, strict=True):
        merge(reference.model, adapter)
    loop = build(checkpoint, *adapters, max_loras_device=1, lora_modules="all")
    rng, image = random.Random(1), some_image(1, 10, 12)
    prefix = some_text(rng, 5, 9) + shown(0, image) + some_text(rng, 5, 9)
    branches = [some_text(rng, 1, 9) for _ in range(3)]
    digests = ["", *(each.digest for each in loop.adapters.description.adapters)]
    asked = [
        wire.Score(str(index), prefix, branches, wire.Labels(LABELS), images=[image], adapter=digest)
        for index, digest in enumerate(digests)
    ]
    replies, found = run(loop, *asked), []
    for message, reference in zip(asked, references, strict=True):
        (scored,) = replies[message.id]
        assert isinstance(scored, wire.Scored), scored
        found.append(torch.tensor(scored.rows))
        expected = torch.tensor([reference.row(prefix + branch, [image], LABELS) for branch in branches])
        torch.testing.assert_close(found[-1], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert loop.stats.computed_images == 1


@pytest.mark.slow
def test_an_adapter_that_peft_has_written(checkpoint: Path, tmp_path: Path) -> None:
    """Its tensors have the names of today's transformers, which patterns match as well, and those of a text model also do."""
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    targets = r".*language_model\..*\.(q_proj|v_proj|up_proj)"
    pattern = {"^model.language_model.layers.0.self_attn.q_proj": 11}
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, r=4, alpha_pattern=pattern, init_lora_weights="gaussian"
    )
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(str(tmp_path / "a"))
    reference = Reference(checkpoint)
    reference.model = adapted.merge_and_unload().eval()
    loop, rng, image = build(checkpoint, tmp_path / "a"), random.Random(2), some_image(2, 4, 6)
    (adapter,) = loop.adapters.description.adapters
    prompt = shown(0, image) + some_text(rng, 5, 9)
    message = wire.Score("s", prompt, [[9]], wire.Labels(LABELS), images=[image], adapter=adapter.digest)
    (scored,) = run(loop, message)["s"]
    assert isinstance(scored, wire.Scored), scored
    expected = torch.tensor([reference.row([*prompt, 9], [image], LABELS)])
    torch.testing.assert_close(torch.tensor(scored.rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_adapters_of_the_tower_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "a", model, ALL, tower=True)
    with pytest.raises(ModelError, match=r"visual\.blocks\.0\.mlp\..* is not supported: adapters of the vision tower"):
        build(checkpoint, adapter)
    other = write_adapter(tmp_path / "b", model, ("q_proj",), target_modules=["q_proj", "qkv"])
    with pytest.raises(ModelError, match=r"target_modules .*'qkv'"):
        build(checkpoint, other)
