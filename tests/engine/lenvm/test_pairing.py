"""A length model beside a base model: what ``/info`` reports of it, and which pairs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop, check
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lenvm import ValueHead, load_lenvm, tokenizer_digest
from yardstick_llm.engine.models.loader import fingerprint
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import length_tilt


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", num_hidden_layers=1)


def build(base: Path, length: Path | None, **settings) -> Loop:
    name = None if length is None else str(length)
    return build_loop(EngineSettings(model=str(base), name="t", lenvm_model=name, **({"max_total_tokens": 256} | settings)))


def lenvm_checkpoint(directory: Path, **overrides) -> Path:
    return make_lenvm_checkpoint(directory, "qwen3", num_hidden_layers=1, **overrides)


@pytest.mark.parametrize(("given", "stored", "gamma"), [(None, None, 0.997), (None, 0.985, 0.985), (0.9, 0.985, 0.9)])
def test_gamma_is_what_is_given_or_stored(base: Path, tmp_path: Path, given, stored, gamma):
    length = lenvm_checkpoint(tmp_path)
    if stored is not None:
        (tmp_path / "lenvm.json").write_text(json.dumps({"gamma": stored}))
    info = build(base, length, lenvm_gamma=given).info
    assert info.lenvm_gamma == gamma
    assert info.capabilities == ["score", "generate", "length_guidance", "grammar"]
    alone = build(base, None).info
    assert (alone.lenvm_gamma, alone.capabilities) == (None, ["score", "generate", "grammar"])
    assert len(info.fingerprint) == len(alone.fingerprint)
    assert info.fingerprint != alone.fingerprint


@pytest.mark.parametrize("stored", [1.0, 0, "0.9", -0.5])
def test_a_gamma_that_is_none(base: Path, tmp_path: Path, stored):
    length = lenvm_checkpoint(tmp_path)
    (tmp_path / "lenvm.json").write_text(json.dumps({"gamma": stored}))
    with pytest.raises(ModelError, match="--lenvm-gamma"):
        build(base, length)


def test_what_the_training_noted_is_checked_and_shown(base: Path, tmp_path: Path):
    """Also where the length model has no tokeniser of its own."""
    length = lenvm_checkpoint(tmp_path)
    calibration = {"edges": [0.5], "log_ratio": {"0.05": [-1.0, -0.5], "0.95": [0.5, 0.25]}, "states": 100}
    facts = {"gamma": 0.9, "tokenizer": tokenizer_digest(base), "calibration": calibration}
    (length / "lenvm.json").write_text(json.dumps(facts))
    assert build(base, length).info.lenvm_calibration == wire.Calibration(**calibration)
    (length / "tokenizer.json").unlink()
    assert build(base, length).info.lenvm_gamma == 0.9
    fewer = {"calibration": calibration | {"log_ratio": {"0.95": [0.5]}}}
    for changed, named in (
        ({"tokenizer": "0" * 32}, "another tokeniser"),
        ({"calibration": {"edges": 3}}, "is damaged"),
        (fewer, "is damaged"),
    ):
        (length / "lenvm.json").write_text(json.dumps(facts | changed))
        with pytest.raises(ModelError, match=named):
            build(base, length)


def test_other_vocabularies_are_refused(base: Path, tmp_path: Path):
    length = lenvm_checkpoint(tmp_path / "short", vocab_size=300)
    (length / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="300 and 320 rows"):
        build(base, length)
    length = lenvm_checkpoint(tmp_path / "renamed")
    content = json.loads((length / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (length / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="does not have the vocabulary"):
        build(base, length)


@pytest.mark.parametrize("rows", [290, 350])
def test_a_vocabulary_that_is_padded_otherwise_fits(base: Path, tmp_path: Path, rows: int):
    """Qwen2.5 7B has 152,064 rows for the tokens for which 1.5B has 151,936."""
    loop = build(base, lenvm_checkpoint(tmp_path, vocab_size=rows))
    assert loop.info.vocab_size == min(rows, 320)
    sampling = wire.Sampling(max_tokens=20, ignore_eos=True, temperature=5.0)
    loop.submit(wire.Generate("g", [5, 6], sampling, length_guidance=wire.LengthGuidance(scale=1.0, top_k=64)))
    tokens = []
    while not loop.idle:
        tokens += [token for reply in loop.step() for token in reply.tokens]
    assert len(tokens) == 20
    assert max(tokens) < loop.info.vocab_size


def test_an_adapter_adds_to_the_base_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its layers are the first ones of the base model, whose weights other than those that it names stay as they are."""
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=2)
    length = lenvm_checkpoint(tmp_path / "length")
    (length / "model.safetensors").unlink()
    save_file(ValueHead(64, torch.float32).requires_grad_(False).state_dict(prefix="v_head."), length / "value_head.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = load_file(base / "model.safetensors")
    parts = {"lora_A": torch.randn(3, stored[name].shape[1]), "lora_B": torch.randn(len(stored[name]), 3)}
    save_file({f"{name}.{part}": matrix for part, matrix in parts.items()}, length / "lenvm_adapter.safetensors")
    facts = {"training": {"init_fingerprint": fingerprint(base, torch.float32)}}
    (length / "lenvm.json").write_text(json.dumps(facts))

    views = load_lenvm(length, base=base).decoder.checkpoint_views()
    assert views.keys() < stored.keys()
    for each, view in views.items():
        added = parts["lora_B"] @ parts["lora_A"] if each == name else 0
        torch.testing.assert_close(view, stored[each] + added)
    loop = build(base, length)
    assert "length_guidance" in loop.info.capabilities
    assert not caplog.records
    changed = make_checkpoint(tmp_path / "changed", "qwen3", num_hidden_layers=2, seed=1)
    assert build(changed, length).info.fingerprint != loop.info.fingerprint
    assert "other weights" in caplog.text

    with pytest.raises(ModelError, match="is an adapter"):
        load_lenvm(length)
    for wrong in (
        {f"{name}.lora_A": parts["lora_A"]},
        {f"{name}.{part}": matrix[:, :2] for part, matrix in parts.items()},
        {f"{name.replace('k_proj', 'n_proj')}.{part}": matrix for part, matrix in parts.items()},
    ):
        save_file({each: matrix.contiguous() for each, matrix in wrong.items()}, length / "lenvm_adapter.safetensors")
        with pytest.raises(ModelError, match="serve the model that it was made for"):
            build(base, length)


INVALID = {
    "top_k of the guidance": {"top_k": 65},
    "constraint": {"constraint": "le"},
    "constraint eq": {"constraint": "eq", "target_length": 3, "target_value": 0.5},
    "constraint about": {"constraint": "about", "target_length": 3, "target_length_mode": "remaining"},
    "need a constraint": {"target_length": 3},
    "return_values": {"return_values": True},
}


@pytest.fixture(scope="module")
def info(base: Path, tmp_path_factory: pytest.TempPathFactory) -> wire.Info:
    return build(base, lenvm_checkpoint(tmp_path_factory.mktemp("length"))).info


@pytest.mark.parametrize("named", INVALID)
def test_bad_guidance_is_refused_by_its_key(info: wire.Info, named: str):
    problem = check(wire.Generate("x", [1], length_guidance=wire.LengthGuidance(**INVALID[named])), info)
    assert problem is not None
    assert named in problem
    assert problem.endswith(".")


def test_without_a_length_model_guidance_is_refused(base: Path):
    alone = build(base, None).info
    for message in (
        wire.Generate("x", [1], length_guidance=wire.LengthGuidance()),
        wire.Score("x", [1], [[2]], wire.LengthValue()),
    ):
        assert check(message, alone) == "This engine has no length model."


def test_kernel_and_wire_clamp_values_alike() -> None:
    """The gateway must not import kernels, so the constant stands in both."""
    assert length_tilt.SMALLEST_VALUE == wire.SMALLEST_VALUE
