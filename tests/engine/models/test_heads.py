"""Models with a classification head or without a head: what is loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import CLASSIFIERS, FAMILIES, HEADLESS, every, make_checkpoint, write_pooling
from tests.engine.models.causal import causal_of
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import fingerprint, load_model
from yardstick_llm.engine.models.pooling import Pooling, load_pooling
from yardstick_llm.engine.settings import EngineSettings

SINGLE = "model.safetensors"
TOKENS = torch.arange(3, 60)


def hidden(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        return decoder(TOKENS, torch.arange(len(TOKENS)), causal_of(decoder.config))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert str(directory) not in message
    assert message.endswith(".")
    return message


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("classes"), "qwen3", model_class=CLASSIFIERS["qwen3"], num_labels=3)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling(make_checkpoint(tmp_path_factory.mktemp("embedder"), "qwen3", model_class=HEADLESS["qwen3"]))


@pytest.fixture
def own(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy to damage."""
    return lambda directory: Path(shutil.copytree(directory, tmp_path / "own"))


@pytest.mark.slow
@pytest.mark.parametrize("family", every(CLASSIFIERS))
def test_class_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    """Models that tie their embedding have no other head either."""
    settings = {"num_labels": 4, "tie_word_embeddings": family.startswith("qwen"), "max_shard_size": "60KB"}
    directory = make_checkpoint(tmp_path, family, model_class=CLASSIFIERS[family], **settings)
    decoder = load_model(directory)
    model = CLASSIFIERS[family].from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, found = model(TOKENS[None]).logits[0], decoder.class_logits(hidden(decoder)[-1:])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert decoder.head is None, "no language-model head is allocated"


@pytest.mark.parametrize("family", every(FAMILIES))
def test_hidden_states_without_a_head_equal_transformers(tmp_path: Path, family: str) -> None:
    directory = write_pooling(make_checkpoint(tmp_path, family, model_class=HEADLESS[family], max_shard_size="60KB"))
    decoder = load_model(directory)
    with torch.no_grad():
        expected = HEADLESS[family].from_pretrained(directory, dtype=torch.float32).eval()(TOKENS[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden(decoder), expected, atol=5e-5, rtol=1e-5)
    assert (decoder.config.lm_head, decoder.head) == (False, None)


def test_weights_of_a_class_without_a_head_have_none_whatever_the_architecture(embedder: Path, own) -> None:
    directory = own(embedder)
    edit_json(directory / "config.json", architectures=["Qwen3ForCausalLM"])
    decoder = load_model(directory)
    assert not decoder.config.lm_head
    assert torch.equal(hidden(decoder), hidden(load_model(embedder)))


def test_a_language_model_with_pooling_keeps_its_head(tmp_path: Path) -> None:
    directory = write_pooling(make_checkpoint(tmp_path, "qwen2"), "mean_tokens")
    config = load_model(directory).config
    assert (config.lm_head, config.pooling) == (True, Pooling("mean"))
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lack tensor lm_head.weight" in error_of(directory)


def test_a_headless_tensor_is_named_as_in_the_file(embedder: Path, own) -> None:
    directory = own(embedder)
    rewrite(directory, lambda tensors: tensors.update({"layers.0.mlp.up_proj.weight": torch.ones(2, 2)}))
    assert "Tensor layers.0.mlp.up_proj.weight in" in error_of(directory)


def test_no_head_and_no_pooling(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", model_class=HEADLESS["llama"])
    assert error_of(directory).startswith("The architecture LlamaModel in config.json has no head, and there is no modules.json")


def test_a_length_model_needs_generations(classifier: Path) -> None:
    settings = EngineSettings(model=str(classifier), name="t", lenvm_model=str(classifier), max_total_tokens=64)
    with pytest.raises(ModelError, match="has no language-model head; leave --lenvm-model out"):
        build_loop(settings)


NEW_TYPES = {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling", "path": "1_Pooling"}
TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}


def test_files_of_older_and_newer_releases(tmp_path: Path) -> None:
    assert load_pooling(write_pooling(tmp_path, "mean_tokens")) == Pooling("mean")
    assert load_pooling(write_pooling(tmp_path, "lasttoken")) == Pooling("last")
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, NEW_TYPES]))
    for mode, pooling in (("lasttoken", "last"), ("mean", "mean")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 64, "pooling_mode": mode}))
        assert load_pooling(tmp_path) == Pooling(pooling)


@pytest.mark.parametrize("modules", [None, [TRANSFORMER, {"type": "custom.Pooling", "path": "1_Pooling"}]])
def test_models_that_do_not_embed(tmp_path: Path, modules: object) -> None:
    write_pooling(tmp_path)
    if modules is None:
        (tmp_path / "modules.json").unlink()
    else:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert load_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("modules.json", b"{", "modules.json is not a list of modules"),
        ("modules.json", b'["Pooling"]', "modules.json is not a list of modules"),
        ("modules.json", json.dumps([TRANSFORMER, NEW_TYPES | {"path": "../1_Pooling"}]).encode(), "names a folder outside"),
        (
            "modules.json",
            json.dumps([TRANSFORMER, NEW_TYPES, {"type": "sentence_transformers.models.CNN", "path": "2_CNN"}]).encode(),
            "module CNN in modules.json is not supported",
        ),
        ("1_Pooling/config.json", b"", "config.json cannot be read as JSON"),
        ("1_Pooling/config.json", b"{}", "1_Pooling/config.json asks for pooling by no mode"),
        (
            "1_Pooling/config.json",
            b'{"pooling_mode_cls_token": true}',
            "Pooling by cls is not supported where",
        ),
        ("1_Pooling/config.json", b'{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}', "by mean and last is"),
        ("1_Pooling/config.json", b'{"pooling_mode_lasttoken": 1}', "pooling_mode_lasttoken in 1_Pooling/config.json is 1"),
        (
            "1_Pooling/config.json",
            b'{"pooling_mode": "mean", "include_prompt": false}',
            "Pooling without the prompt is not",
        ),
    ],
)
def test_pooling_that_is_refused(embedder: Path, own, file: str, content: bytes, named: str) -> None:
    directory = own(embedder)
    (directory / file).write_bytes(content)
    assert named in error_of(directory)


def test_the_fingerprint_knows_the_pooling(embedder: Path, own) -> None:
    directory = own(embedder)
    first = fingerprint(directory, torch.float32)
    write_pooling(directory, normalize=False)  # each request says whether to normalise
    assert fingerprint(directory, torch.float32) == first
    write_pooling(directory, "mean_tokens")
    assert fingerprint(directory, torch.float32) != first
