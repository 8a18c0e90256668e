"""The text side of a model directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models.files import ModelError
from engine.models.source import MAX_PRESET_BYTES, PRESET_FILE, tokenizer_files
from tests.checkpoints import CLASSIFIERS, make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3", model_class=CLASSIFIERS["qwen3"], num_hidden_layers=1)


def test_architecture_and_no_preset(model: Path) -> None:
    files = tokenizer_files(model)
    assert (files.architecture, files.preset) == ("Qwen3ForSequenceClassification", None)
    assert files.special_tokens["eos_token"] == "<|im_end|>"


def test_a_preset_is_passed_on_as_it_is(model: Path) -> None:
    text = "# ä\n" + "x" * (MAX_PRESET_BYTES - 5)
    (model / PRESET_FILE).write_bytes(text.encode())
    assert tokenizer_files(model).preset == text


@pytest.mark.parametrize(
    ("content", "named"), [(b"x" * (MAX_PRESET_BYTES + 1), "has more than 65536 bytes; shorten it."), (b"\xff", "is not UTF-8")]
)
def test_a_preset_that_is_refused(model: Path, content: bytes, named: str) -> None:
    (model / PRESET_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=f"^{PRESET_FILE} in the model directory {named}"):
        tokenizer_files(model)
