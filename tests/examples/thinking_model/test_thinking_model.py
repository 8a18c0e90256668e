"""The task of the thinking model, and a short run of its programs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch

from examples.demo_models.shapes import length_config
from examples.thinking_model import measure, task, train
from yardstick_llm.engine.models.config import ModelConfig


def test_every_thought_is_right_and_ends_with_the_answer() -> None:
    rng = Random(1)
    lengths = set()
    for _ in range(200):
        question = task.draw_question(rng)
        thoughts, answer = task.draw_text(question, rng).split(task.ANSWER)
        for before, number, total in re.findall(r"(\d+)(?:\+| plus )(\d+)(?:=| is )(\d+)", thoughts):
            assert int(before) + int(number) == int(total)
        assert re.findall(r"\d+", thoughts)[-1] == question.answer
        assert answer == f"\n{question.answer}{task.END}"
        lengths.add(len(thoughts))
    assert max(lengths) > 5 * min(lengths), "equal questions have thoughts of very different lengths"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_run_of_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, with one narrow layer and short answers."""

    def small(*given: int) -> ModelConfig:
        return dataclasses.replace(length_config(*given), num_layers=1, hidden_size=32, intermediate_size=32)

    def run(program: ModuleType, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", [program.__name__, *arguments])
        program.main()

    monkeypatch.setattr(train, "length_config", small)
    monkeypatch.setattr(measure, "LIMIT", 60)
    threads = torch.get_num_threads()
    try:
        run(train, "--out", str(tmp_path), "--steps", "3", "--length-steps", "2", "--texts", "40")
    finally:
        torch.set_num_threads(threads)
    run(measure, str(tmp_path), "--questions", "2", "--budgets", "6", "40", "--plot", str(tmp_path / "plot.png"))
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    bounded = [(way, budget) for budget in (6, 40) for way in ("steered", "cut off")]
    assert [(row["way"], row["budget"]) for row in rows] == [("free", None), *bounded]
    assert (tmp_path / "plot.png").stat().st_size > 1000
