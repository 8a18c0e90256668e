"""The length-value model: its head against the formula, and every layout of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.engine.models.causal import causal
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lenvm import LenVM, load_lenvm, save_lenvm
from yardstick_llm.engine.models.loader import load_model

SIZE = 64
TOKENS = torch.arange(3, 60)


def value_tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"fc.weight": (SIZE, SIZE), "fc.bias": (SIZE,), "summary.weight": (1, SIZE), "summary.bias": (1,)}
    return {f"v_head.{name}": scale * torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def add_to_main(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    main = directory / "model.safetensors"
    save_file(load_file(main) | tensors, main, metadata={"format": "pt"})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A decoder with an unused head of its own, and no value head yet."""
    return make_checkpoint(tmp_path / "value", "qwen3")


def values(model: LenVM) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return model.value(model(TOKENS, torch.arange(len(TOKENS)), causal))


def expected_z(directory: Path, head: dict[str, torch.Tensor]) -> torch.Tensor:
    """Linear, SiLU, Linear written out, on the hidden states of the plain decoder."""
    with torch.no_grad():
        hidden = load_model(directory)(TOKENS, torch.arange(len(TOKENS)), causal)
    inner = hidden @ head["v_head.fc.weight"].T + head["v_head.fc.bias"]
    return (inner / (1 + torch.exp(-inner))) @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]


@pytest.mark.parametrize("layout", ["own file", "main file"])
def test_value_is_the_formula(directory: Path, layout: str) -> None:
    expected = expected_z(directory, value_tensors())
    if layout == "own file":
        save_file(value_tensors(), directory / "value_head.safetensors")
    else:
        add_to_main(directory, value_tensors())
    z, v = values(load_lenvm(directory))
    assert z.std() > 0.01
    torch.testing.assert_close(z, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v, 1 / (1 + torch.exp(-expected)), atol=1e-6, rtol=1e-5)


def test_tied_checkpoint_with_only_a_head_tensor(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    expected = expected_z(directory, value_tensors())
    main = directory / "model.safetensors"
    tensors = load_file(main) | value_tensors()
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, main)
    torch.testing.assert_close(values(load_lenvm(directory))[0], expected, atol=1e-5, rtol=1e-5)


def test_no_head_at_all(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"value_head\.safetensors is missing"):
        load_lenvm(directory)


@pytest.mark.parametrize(
    ("change", "named"), [("missing", r"v_head\.summary\.bias"), ("extra", r"v_head\.norm"), ("shape", r"v_head\.fc\.bias")]
)
def test_wrong_head(directory: Path, change: str, named: str) -> None:
    tensors = value_tensors()
    if change == "missing":
        del tensors["v_head.summary.bias"]
    elif change == "extra":
        tensors["v_head.norm.weight"] = torch.ones(SIZE)
    else:
        tensors["v_head.fc.bias"] = torch.ones(SIZE + 1)
    save_file(tensors, directory / "value_head.safetensors")
    with pytest.raises(ModelError, match=named):
        load_lenvm(directory)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 0.0), (torch.float16, 0.02)])
def test_round_trip(directory: Path, tmp_path: Path, dtype: torch.dtype | None, tolerance: float) -> None:
    save_file(value_tensors(), directory / "value_head.safetensors")
    model = load_lenvm(directory)
    save_lenvm(model, tmp_path / "saved", dtype)
    again = load_lenvm(tmp_path / "saved")
    assert again.config == model.config
    torch.testing.assert_close(values(again)[0], values(model)[0], atol=tolerance, rtol=0)
