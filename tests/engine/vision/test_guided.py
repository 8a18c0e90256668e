"""Guided generations about images: each candidate's text on its own through transformers, then the head and the formulas."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.engine.lenvm.plain import GAMMA, Plain, make_lenvm_checkpoint
from tests.engine.lenvm.writing import build_guided, guidance, guided, run, verify
from tests.engine.parity import some_tokens
from tests.engine.recording import Recorder
from tests.engine.vision.models import IMAGE_PAD, TEXT, Reference, make_vision_checkpoint, shown, some_image, some_text
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop import build
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import attention_layout, branch_attention

SMALLER = TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


class VisionPlain(Plain):
    """Both models with images, without cache, batch or branches."""

    def __init__(self, base: Path, length: Path, images: list[wire.Image]) -> None:
        reading, valuing = Reference(base), Reference(length)
        self.base = lambda ids: SimpleNamespace(logits=reading.logits(ids[0].tolist(), images)[None])
        self.length = lambda ids: SimpleNamespace(
            last_hidden_state=torch.stack([valuing.hidden(row, images) for row in ids.tolist()])
        )
        self.head = load_file(length / "value_head.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    base = make_vision_checkpoint(directory / "base")
    length = make_vision_checkpoint(directory / "length", seed=1, text=SMALLER, depth=2, fullatt_block_indexes=[0])
    generator = torch.Generator().manual_seed(3)
    shapes = {"fc.weight": (32, 32), "fc.bias": (32,), "summary.weight": (1, 32), "summary.bias": (1,)}
    head = {f"v_head.{name}": torch.randn(shape, generator=generator) * 32**-0.5 * 2 for name, shape in shapes.items()}
    save_file(head, length / "value_head.safetensors")
    return base, length


@pytest.fixture(scope="module")
def images() -> list[wire.Image]:
    return [some_image(1, 6, 14), some_image(2, 4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "settings"), [("compact", {}), ("overlapped", {"max_batched_tokens": 17, "max_total_tokens": 220})]
)
def test_guided_draws_equal_plain_forwards(form: str, settings: dict, pair: tuple[Path, Path], images: list[wire.Image]) -> None:
    rng, plain = random.Random(4), VisionPlain(*pair, images)
    ways = [{"scale": 3.0}, {"mode": "mul", "scale": 0.8, "gamma": 0.99}, {"constraint": "le", "target_length": 4}]
    prompts = [
        some_text(rng, 3, 5) + shown(0, images[0]) + some_text(rng, 3, 5),
        shown(1, images[1]) + some_text(rng, 3, 5) + shown(0, images[0]) + some_text(rng, 1, 2),
        some_tokens(rng, 20, 30),
    ]
    loop = build_guided(pair, form, **settings)
    messages = []
    for place, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
        message = guided(f"g{place}", prompt, guidance(**way), max_tokens=5)
        messages.append(msgspec.structs.replace(message, images=images))
    replies = run(loop, *messages)
    assert sum(verify(plain, message, replies[message.id]) for message in messages) >= 6
    assert loop.stats.computed_images == 4  # two on each model


def test_length_values_of_prompts_with_images(pair: tuple[Path, Path], images: list[wire.Image]) -> None:
    rng, plain = random.Random(5), VisionPlain(*pair, images)
    prefix, branches = (
        some_text(rng, 3, 5) + shown(0, images[0]),
        [shown(1, images[1]) + some_text(rng, 2, 3), some_text(rng, 2, 3)],
    )
    message = wire.Score("v", prefix, branches, wire.LengthValue(), images=images)
    found = run(build_guided(pair, "compact"), message)["v"][0].rows
    wanted = [plain.raw_values([prefix + branch]).tolist() for branch in branches]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_pairs_must_read_images_alike(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text_length = make_lenvm_checkpoint(tmp_path / "length", "qwen2")
    with pytest.raises(ModelError, match="do not read images alike"):
        build_guided((pair[0], text_length), "compact")
    with pytest.raises(ModelError, match="do not read images alike"):
        build_guided((make_checkpoint(tmp_path / "base", "qwen2"), pair[1]), "compact")


@pytest.mark.slow
def test_captured_passes_place_candidates_behind_images(
    pair: tuple[Path, Path], images: list[wire.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for CUDA graphs replays passes whose positions are less than their numbers of tokens."""
    monkeypatch.setattr(build, "make_graphs", lambda *_: ())
    monkeypatch.setattr(build, "PARTS", (2,))
    monkeypatch.setattr(attention_layout, "PROGRAMS", 8)  # less padding for the interpreter
    monkeypatch.setattr(branch_attention, "PROGRAMS", 4)
    monkeypatch.setattr(capturing, "_graphs_problem", lambda decoder: None)
    monkeypatch.setattr(build, "CudaCapture", lambda device: Recorder(monkeypatch))
    base, length = map(str, pair)
    settings = {"max_total_tokens": 200, "overlap": True, "attention": "triton", "cuda_graphs": "on", "dtype": "float32"}
    loop = build_loop(EngineSettings(model=base, name="t", lenvm_model=length, lenvm_gamma=GAMMA, **settings))
    plain = VisionPlain(*pair, images)
    prompts = {"image": [9, *shown(1, images[1]), 11], "text": [9, 10, 11]}
    no_images = {IMAGE_PAD: -100.0}  # as text, which transformers refuses
    messages = [guided(name, prompt, guidance(scale=3.0), max_tokens=4, logit_bias=no_images) for name, prompt in prompts.items()]
    messages = [msgspec.structs.replace(message, images=images) for message in messages]
    replies = run(loop, *messages)
    assert sum(verify(plain, message, replies[message.id]) for message in messages) >= 4
    assert loop.stats.replayed_lenvm_passes >= 3
