"""Model folders with hostile files: the engine refuses each with one line that names the file, and reads nothing outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.encoders import add_module, make_encoder
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.source import located, tokenizer_files
from yardstick_llm.engine.settings import EngineSettings

DEEP = "[" * 100_000
HALF_A_PAIR = "\ud800"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    make_encoder(root / "embed", "bert")
    make_encoder(root / "classes", "bert", "classes")
    make_encoder(root / "rotary", "modernbert")
    make_encoder(root / "sparse", "bert", "masked")
    make_checkpoint(root / "decoder", "qwen3", num_hidden_layers=1)
    return root


def copied(pristine: Path, kind: str, target: Path) -> Path:
    return Path(shutil.copytree(pristine / kind, target / "above" / "model"))


def edit(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in (raw | changes).items() if value is not ...}))


def start(directory: Path) -> None:
    """Load the model and the tokeniser's files, as an engine does when it starts."""
    settings = located(EngineSettings(model=str(directory), name="test", max_total_tokens=1024, threads=1))
    build_loop(settings)
    tokenizer_files(Path(settings.model))


def refusal(directory: Path) -> str:
    """Start an engine, which must refuse the model. -> its error"""
    with pytest.raises(ModelError) as raised:
        start(directory)
    line = str(raised.value)
    assert "\n" not in line
    assert str(directory) not in line
    assert line.encode()
    return line


@pytest.mark.parametrize(
    ("kind", "key", "value", "named"),
    [
        ("classes", "num_labels", 10**12, "num_labels in config.json is 1000000000000; at most"),
        ("embed", "hidden_size", 1 << 40, "sizes of tensors that do not fit in memory"),
        ("embed", "vocab_size", 10**30, "vocab_size in config.json is 10"),
        ("embed", "architectures", 5, "architectures in config.json is 5"),
        ("embed", "layer_norm_eps", 10**400, "layer_norm_eps in config.json"),
        ("rotary", "max_position_embeddings", 1 << 31, "max_position_embeddings in config.json is 2147483648; at most"),
        ("decoder", "hidden_size", 1 << 40, "sizes of tensors that do not fit in memory"),
        ("decoder", "num_hidden_layers", 1 << 31, "num_hidden_layers in config.json is 2147483648; at most"),
        ("decoder", "max_position_embeddings", 10**30, "max_position_embeddings in config.json is 10"),
    ],
)
def test_numbers_of_the_configuration(pristine: Path, tmp_path: Path, kind: str, key: str, value: Any, named: str) -> None:
    directory = copied(pristine, kind, tmp_path)
    edit(directory / "config.json", **({"id2label": ..., "label2id": ...} if kind == "classes" else {}), **{key: value})
    assert named in refusal(directory)


@pytest.mark.parametrize("kind", ["embed", "decoder"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "modules.json"])
@pytest.mark.parametrize("content", [DEEP, json.dumps([{"type": HALF_A_PAIR, "path": ""}])], ids=["deep", "half a pair"])
def test_json_that_is_refused(pristine: Path, tmp_path: Path, kind: str, file: str, content: str) -> None:
    directory = copied(pristine, kind, tmp_path)
    (directory / file).write_text(content)
    assert file in refusal(directory)


def test_half_a_surrogate_pair_in_a_name(pristine: Path, tmp_path: Path) -> None:
    """No message to a gateway can hold it."""
    directory = copied(pristine, "classes", tmp_path)
    edit(directory / "config.json", id2label={"0": HALF_A_PAIR, "1": "a", "2": "\U0001f98a"})
    assert "config.json cannot be read as JSON" in refusal(directory)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"eos_token": {"id": 2}}, "eos_token in tokenizer_config.json is {'id': 2}"),
        ({"chat_template": ["a"]}, "chat_template in tokenizer_config.json"),
        ({"chat_template": [{"name": "default"}]}, "chat_template in tokenizer_config.json"),
    ],
)
def test_settings_of_the_tokeniser(pristine: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    directory = copied(pristine, "decoder", tmp_path)
    edit(directory / "tokenizer_config.json", **changes)
    assert named in refusal(directory)


def test_a_template_that_is_no_text(pristine: Path, tmp_path: Path) -> None:
    directory = copied(pristine, "decoder", tmp_path)
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja in the model directory is not UTF-8" in refusal(directory)


def test_tasks_without_a_vocabulary(pristine: Path, tmp_path: Path) -> None:
    directory = copied(pristine, "embed", tmp_path)
    edit(directory / "config.json", lora_adaptations=["a"])
    (directory / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json has no vocabulary"):
        tokenizer_files(directory)


@pytest.mark.parametrize("folder", ["..", "../other", "{above}/other", "\0"])
def test_no_file_outside_the_folder_is_read(pristine: Path, tmp_path: Path, folder: str) -> None:
    directory, other = copied(pristine, "embed", tmp_path), tmp_path / "above" / "other"
    for each in (other, other.parent):
        shutil.copytree(directory / "1_Pooling", each, dirs_exist_ok=True)
    modules = json.loads((directory / "modules.json").read_text())
    modules[1]["path"] = folder.format(above=other.parent)
    (directory / "modules.json").write_text(json.dumps(modules))
    assert "modules.json names a folder outside the model directory" in refusal(directory)


@pytest.mark.parametrize("route", ["query", "document"])
def test_no_route_leads_outside_the_folder(pristine: Path, tmp_path: Path, route: str) -> None:
    directory = copied(pristine, "sparse", tmp_path)
    (directory / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Router", "path": ""}]))
    types = {"": "s.MLMTransformer", "1": "s.SpladePooling", "..": "s.SparseStaticEmbedding", "../1": "s.SpladePooling"}
    structure = {"document": ["", "1"], "query": [".."]} if route == "query" else {"document": ["", "../1"], "query": ["1"]}
    edit(directory / "router_config.json", types=types, structure=structure)
    assert "router_config.json names a folder outside the model directory" in refusal(directory)
    edit(directory / "router_config.json", types=..., structure={"document": ["", "1"], "query": 5})
    assert "Router" in refusal(directory)


def test_a_residual_without_weights(pristine: Path, tmp_path: Path) -> None:
    """Its matrix would have the numbers that were in memory before."""
    directory = copied(pristine, "embed", tmp_path)
    weights = {"linear.weight": torch.ones(8, 64), "linear.bias": torch.ones(8)}
    add_module(directory, "Dense", {"in_features": 64, "out_features": 8, "use_residual": True}, weights)
    assert "The weights lack tensor weight" in refusal(directory)
