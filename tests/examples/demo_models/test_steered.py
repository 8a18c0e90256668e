"""The program reproduces docs/generation.md's table of one prompt at five scales."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.demo_models import steered
from examples.demo_models.steered import SCALES, measure, table

PAGE = Path(__file__).parents[3] / "docs" / "generation.md"
MARK = "<!-- python -m examples.demo_models.steered -->\n"


def rows_of_the_page() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(MARK) + len(MARK) :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor rounds otherwise, which turns a draw now and then; so means are compared, and words not. The others of the
    five scales would take most of the time, so a negative and a positive one are measured."""
    head, _, *rows = rows_of_the_page()
    monkeypatch.setattr(steered, "SCALES", SCALES[::3])
    measured = measure()
    made = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(measured).splitlines()]
    assert made[0] == head
    assert [float(row[0]) for row in rows] == list(SCALES)
    for row, found in zip(rows[::3], measured, strict=True):
        assert float(row[1]) == pytest.approx(found.mean, rel=0.1)
        assert re.match(r"\(\d+\) A ", row[3])
    assert measured[0].mean < measured[1].mean
