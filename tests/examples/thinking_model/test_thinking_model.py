"""The task of the thinking model, and a short run of its programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from examples.thinking_model import task

ROOT = Path(__file__).parents[3]


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
def test_a_short_run_of_the_programs(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "examples.thinking_model.train", "--out", str(tmp_path)]
    subprocess.run([*train, "--steps", "3", "--length-steps", "2", "--texts", "40"], cwd=ROOT, check=True, timeout=300)
    measure = [sys.executable, "-m", "examples.thinking_model.measure", str(tmp_path), "--questions", "2", "--budgets", "6", "40"]
    done = subprocess.run(
        [*measure, "--plot", str(tmp_path / "plot.png")], cwd=ROOT, check=True, timeout=300, capture_output=True, text=True
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    bounded = [(way, budget) for budget in (6, 40) for way in ("steered", "cut off")]
    assert [(row["way"], row["budget"]) for row in rows] == [("free", None), *bounded]
    assert (tmp_path / "plot.png").stat().st_size > 1000
