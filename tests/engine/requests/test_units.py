"""Units of a text: the counts of plain functions over the whole text, however it is divided into tokens."""

from __future__ import annotations

import random
import re

import pytest

from yardstick_llm.engine import wire
from yardstick_llm.engine.requests.units import USUAL, Written, measure

TEXTS = (
    "A review. It costs 3.50 today, really!  And (yes?) it lasts\n\nfor years...  Buy it.",
    "One two  three\tfour.",
    'He said "stop." Then: nothing.',
    "Größe über alles. Naïve café? Ja!",
)


def plain(text: str, unit: wire.LengthUnit) -> int:
    if unit == "characters":
        return len(text)
    return len(text.split()) if unit == "words" else len(re.findall(r"[.!?]+[\"')\]]*(?=\s|$)", text))


@pytest.mark.parametrize("unit", ["words", "sentences", "characters"])
@pytest.mark.parametrize("text", TEXTS)
def test_units_are_those_of_the_whole_text(text: str, unit: wire.LengthUnit) -> None:
    lot = random.Random(0)
    whole = text.encode()
    for _ in range(50):
        cuts = (
            sorted(lot.sample(range(1, len(whole)), 12))
            if unit != "sentences"
            else [m.start() for m in re.finditer(rb"\s+\S", whole)]
        )
        pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        spellings = [b"", *pieces]
        written = Written(unit)
        written.add([0, *range(1, len(spellings)), 0], spellings)
        assert written.read == len(pieces) + 2
        assert round(written.done + (unit == "words") * 0.5) == plain(text, unit)


def test_the_ratio_moves_from_the_usual_one_to_that_of_the_text() -> None:
    """In a text with four tokens a word, more tokens are left than the usual ratio says; a prompt of such words tells at once."""
    spellings = [b" a", b"b", b"c", b"d"]
    written = Written("words")
    assert written.left(100) == 100 * USUAL["words"].tokens
    written.add([0, 1, 2, 3] * 60, spellings)
    assert written.left(100) == pytest.approx(41 * 4, rel=0.25)
    assert Written("words", measured=measure([[0, 1, 2, 3] * 60, [0, 1]], spellings)).left(100) == 400
    assert measure([[0, 1, 2, 3] * 19], spellings) == {"characters": pytest.approx(76 / 95)}
    told = Written("words", [0, 1, 2, 3] * 100, spellings)
    assert 3 < told.tokens_of_unit < 4
    assert written.left(30) < -29 * written.tokens_of_unit
    assert told.left(100) == 100 * told.tokens_of_unit


def test_languages_without_spaces_have_sentences_and_characters() -> None:
    text = "今天很好。你呢？很好！"
    for unit, count in (("sentences", 3), ("characters", 11)):
        written = Written(unit)
        written.add(range(len(text)), [each.encode() for each in text])
        assert int(written.done) == count
