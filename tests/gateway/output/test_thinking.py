"""Thinking sections, divided anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.gateway.output.answer import (
    THINKING,
    AnswerFormat,
    AnswerReader,
    Split,
    Thinking,
    ThinkingParser,
    is_off,
    is_open,
    thinking_of,
)
from yardstick_llm.gateway.output.parser import joined

TAGS = THINKING["think"]
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "a", "😀"]), max_size=9).map("".join)


def read(chunks: list[str], *, opened: bool) -> Split:
    parser = ThinkingParser(TAGS, opened=opened)
    splits = [parser.push(chunk) for chunk in chunks] + [parser.finish()]
    return Split("".join(split.reasoning for split in splits), "".join(split.content for split in splits))


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("\n Yes.", False, "", "\n Yes."),
        ("<think>Hm", False, "Hm", ""),
        ("<think>Hm</thin", False, "Hm</thin", ""),
        ("Yes.</think>", False, "", "Yes.</think>"),
    ],
)
def test_sections(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert read([text], opened=opened) == read(list(text), opened=opened) == Split(reasoning, content)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """``text``, divided at ``cuts``."""
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    return [text[begin:end] for begin, end in pairwise(places)]


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 60), max_size=6))
def test_any_text_divided_anywhere_gives_the_same(text: str, opened: bool, cuts: list[int]) -> None:
    whole = read([text], opened=opened)
    assert read(pieces(text, cuts), opened=opened) == read(list(text), opened=opened) == whole
    kept = "".join(char for char in whole.reasoning + whole.content if char not in "\n ")
    lost = sorted("".join(char for char in text if char not in "\n ").replace("<think>", "", 1).replace("</think>", "", 1))
    assert sorted(kept) in (lost, sorted(char for char in text if char not in "\n ")) or len(kept) >= len(lost)


def test_a_template_and_a_prompt_tell_the_format() -> None:
    assert thinking_of("… <think> … </think>") == "think"
    assert thinking_of("[THINK] [/THINK]") == "mistral"
    assert thinking_of("plain") is None
    assert is_open("assistant\n<think>\n", TAGS)
    assert is_off("assistant\n<think>\n\n</think>\n\n", TAGS)


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("opened", [False, True])
def test_tokens_are_counted_up_to_the_closing_tag(size: int, opened: bool) -> None:
    """One token is one element here: 7 opens, 8 closes."""
    texts = {7: "<think>", 8: "</think>", 1: "a"}
    tokens = [*([] if opened else [7]), 1, 1, 8, 1, 1, 1]
    reader = AnswerReader(AnswerFormat(thinking=Thinking("think", opened, 7, 8)))
    parts = []
    for begin in range(0, len(tokens), size):
        some = tokens[begin : begin + size]
        parts += reader.push("".join(texts[token] for token in some), some)
    parts += reader.finish()
    assert reader.reasoning_tokens == 3 + (not opened)
    assert (joined(parts).reasoning, joined(parts).content) == ("aa", "aaa")
