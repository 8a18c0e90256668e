"""The training program, run for a few steps, writes everything that the shipped models consist of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.demo_models import batches, train
from examples.demo_models.lenvm import GAMMA, Text
from examples.demo_models.lenvm import collate as collate_lengths
from examples.demo_models.prompts import END
from examples.demo_models.shapes import base_config, length_config
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.config import ModelConfig, load_config
from yardstick_llm.engine.models.lenvm import load_lenvm
from yardstick_llm.engine.models.loader import load_model


def small(shape: Callable[[int, int], ModelConfig]) -> Callable[[int, int], ModelConfig]:
    """``shape`` with one narrow layer, which trains and generates much faster."""
    return lambda *given: dataclasses.replace(shape(*given), num_layers=1, hidden_size=32, intermediate_size=32)


@dataclasses.dataclass(frozen=True)
class Budget(train.Budget):
    """More texts, because most texts of a model that has hardly been trained do not end, and are left out."""

    generations: int = 20_000
    texts: int = 12_000


def test_the_shipped_models_have_the_programs_shapes() -> None:
    base, tokenizer = load_config(MODELS / "base"), load_tokenizer(MODELS / "base")
    given = tokenizer.get_vocab_size(), tokenizer.encode(END).ids[0]
    assert (base_config(*given), length_config(*given)) == (base, load_config(MODELS / "lenvm"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_run_writes_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, threads = tmp_path / "models", torch.get_num_threads()
    monkeypatch.setattr(batches, "POOL", 4)
    monkeypatch.setattr(train, "Budget", Budget)
    monkeypatch.setattr(train, "base_config", small(base_config))
    monkeypatch.setattr(train, "length_config", small(length_config))
    monkeypatch.setattr("sys.argv", ["train", "--out", str(out), "--steps", "4", "--threads", "1"])
    try:
        train.main()
    finally:
        torch.set_num_threads(threads)
    assert "base model: step     4 of 4" in capsys.readouterr().out
    assert load_model(out / "base").config.num_layers == load_lenvm(out / "lenvm").config.num_layers == 1
    assert json.loads((out / "lenvm" / "lenvm.json").read_text(encoding="utf-8")) == {"gamma": GAMMA}
    figures = json.loads((out / "figures.json").read_text(encoding="utf-8"))
    assert 0 <= figures["auc_mixed"] <= 1
    shipped = {path.relative_to(MODELS) for folder in ("base", "lenvm") for path in (MODELS / folder).iterdir()}
    assert {path.relative_to(out) for folder in ("base", "lenvm") for path in (out / folder).iterdir()} == shipped
    for folder in ("base", "lenvm"):  # the tokeniser depends on the corpus and the seed alone
        assert load_tokenizer(out / folder).to_str() == load_tokenizer(MODELS / folder).to_str()


def test_values_count_down_to_the_end_token() -> None:
    batch = collate_lengths([Text([7, 8, 9], [4, 5, 0]), Text([7], [0])])
    assert batch.tokens.tolist() == [[7, 8, 9, 4, 5], [7, 0, 0, 0, 0]]
    assert batch.counted.tolist() == [[False, False, True, True, True], [True, False, False, False, False]]
    assert batch.values[0, 2:].allclose(1 - GAMMA ** torch.tensor([3.0, 2.0, 1.0]))
    assert batch.values[1, 0].item() == pytest.approx(1 - GAMMA)
