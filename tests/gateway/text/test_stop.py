"""Stop strings, against the definition read off the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.gateway.text.vocabulary import StopStrings

LETTERS = st.text("ab😀", max_size=12)


def defined(text: str, stops: list[str]) -> tuple[str, bool]:
    """A reader of one character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(text=LETTERS, stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4), data=st.data())
def test_every_chunking_gives_what_the_definition_says(text: str, stops: list[str], data: st.DataObject) -> None:
    stream = StopStrings(stops)
    told, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        new, stopped = stream.push(rest[:size])
        told, rest = told + new, rest[size:]
    assert (told + stream.finish(), stopped) == defined(text, stops)


@given(text=LETTERS, stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4))
def test_only_what_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    told, stopped = stream.push(text)
    held = text[len(told) :]
    if not stopped and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
