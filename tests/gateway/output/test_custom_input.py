"""The text of a custom tool, read out of arguments that arrive in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.gateway.output.parser import CustomInput


def read(chunks: list[str]) -> str:
    reader = CustomInput()
    return "".join(map(reader.push, chunks))


@given(st.text(max_size=30), st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_divided_anywhere_is_decoded(text: str, ascii_only: bool, indent: int | None, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    places = sorted({0, *(min(cut, len(arguments)) for cut in cuts), len(arguments)})
    assert read([arguments[begin:end] for begin, end in pairwise(places)]) == text
    assert read(list(arguments)) == text


@given(st.text(alphabet='{}":\\input u0dD8é\n', max_size=40))
def test_other_arguments_give_the_same_in_any_pieces(text: str) -> None:
    for arguments in (text, '{"input": "' + text):
        assert read(list(arguments)) == read([arguments])


@pytest.mark.parametrize("arguments", ['{"text": "a"}', '{"input": 7}', '{"in": 1}', "[1]"])
def test_arguments_of_another_form_are_passed_on(arguments: str) -> None:
    assert read(list(arguments)) == arguments


def test_the_text_is_told_before_it_is_complete() -> None:
    reader = CustomInput()
    assert reader.push('{"input": "ab') == "ab"
    assert reader.push("\\ud83d") == ""
    assert reader.push("\\ude00c") == "😀c"
