"""Every way a model directory can be wrong is one clear error, before serving."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.files import ModelError
from engine.models.loader import fingerprint, load_model
from engine.models.source import locate
from tests.checkpoints import make_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine"), "qwen3")


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A whole checkpoint of its own to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", "qwen3", max_shard_size="60KB")


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of ``model.safetensors``."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert str(directory) not in message, "an error names files, not paths"
    return message


def test_missing_tensor(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop(Q_PROJ))
    assert f"lack tensor {Q_PROJ};" in error_of(model)


def test_missing_tensors_are_counted(model: Path) -> None:
    rewrite(model, lambda tensors: [tensors.pop(Q_PROJ), tensors.pop(EMBEDDING)])
    assert "and 1 more" in error_of(model)


def test_unexpected_tensor(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.mlp.experts.weight": torch.ones(2)}))
    assert "model.layers.0.mlp.experts.weight" in error_of(model)


def test_wrong_shape(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 32)}))
    message = error_of(model)
    assert Q_PROJ in message
    assert "[64, 32], not [64, 64]" in message


def test_unsupported_stored_dtype(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float64)}))
    message = error_of(model)
    assert Q_PROJ in message
    assert "F64" in message


def test_truncated_file(model: Path) -> None:
    content = (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(content[:-100])
    assert f"{SINGLE} is damaged or incomplete" in error_of(model)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64])
def test_corrupt_file(model: Path, content: bytes) -> None:
    (model / SINGLE).write_bytes(content)
    assert f"{SINGLE} is damaged or incomplete" in error_of(model)


def test_pickled_weights_are_not_read(model: Path) -> None:
    torch.save(load_file(model / SINGLE), model / "pytorch_model.bin")
    (model / SINGLE).unlink()
    assert "convert it to safetensors" in error_of(model)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name} is missing" in error_of(sharded)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{"])
def test_damaged_index(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    assert INDEX in error_of(sharded)


def test_index_cannot_lead_outside(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "../secret.safetensors"}}))
    assert "outside the model directory" in error_of(sharded)


def test_missing_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in error_of(model)


def test_nothing_is_copied_before_all_is_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(model, lambda tensors: tensors.pop(Q_PROJ))
    monkeypatch.setattr("engine.models.checkpoint.copy", lambda *_: pytest.fail("copied"))
    error_of(model)


def test_obsolete_rotary_buffers_are_ignored(model: Path) -> None:
    before = load_model(model)
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert same_weights(load_model(model), before)


@pytest.mark.parametrize("change", ["both", "head only"])
def test_tied_embedding_under_the_heads_name(tmp_path: Path, change: str) -> None:
    model = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    before = load_model(model)

    def duplicate(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if change == "head only":
            del tensors[EMBEDDING]

    rewrite(model, duplicate)
    assert same_weights(load_model(model), before)


def test_untied_model_needs_both(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop(EMBEDDING))
    assert EMBEDDING in error_of(model)


def test_what_is_neither_directory_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}/nowhere is not a directory; give")):
        locate(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file is not a directory"):
        locate(tmp_path / "file")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing.*check the name and the network, or give a local directory"):
        locate("nobody/nothing")


def test_hub_id_in_the_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pristine: Path) -> None:
    """The hub's own cache layout, as an earlier download leaves it."""
    monkeypatch.chdir(tmp_path)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--someone--model"
    shutil.copytree(pristine, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert same_weights(load_model("someone/model"), load_model(pristine))


def test_fingerprint_tells_models_apart(model: Path, sharded: Path) -> None:
    first = fingerprint(model, torch.float32)
    assert first == fingerprint(model, torch.float32)
    assert fingerprint(sharded, torch.float32) == fingerprint(sharded, torch.float32)
    others = [fingerprint(model, torch.bfloat16), fingerprint(sharded, torch.float32)]
    rewrite(model, lambda tensors: tensors[Q_PROJ][3].mul_(1.001))
    others.append(fingerprint(model, torch.float32))
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    others.append(fingerprint(model, torch.float32))
    assert len({first, *others}) == 5


def test_fingerprint_of_large_files_samples_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.loader.HASHED_WHOLE", 1000)
    monkeypatch.setattr("engine.models.loader.SAMPLE_BLOCK", 1000)
    before = fingerprint(model, torch.float32)
    rewrite(model, lambda tensors: [tensor.mul_(1.01) for tensor in tensors.values()])
    assert fingerprint(model, torch.float32) != before


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
