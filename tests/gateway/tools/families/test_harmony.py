"""Messages of gpt-oss: channels, recipients, and what is counted as thinking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.answer import AnswerFormat, AnswerReader, Thinking, Tools
from gateway.tools.families.harmony import TOKENS, HarmonyParser
from gateway.tools.parts import Joined, joined
from tests.gateway.tools.test_thinking import pieces

ANALYSIS = "<|channel|>analysis<|message|>User asks. Use f.<|end|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
TURN = "<|start|>assistant"
FUNCTIONS = {"f": [], "g": []}


def parser(most_calls: int | None = None, customs: tuple[str, ...] = ()) -> HarmonyParser:
    return HarmonyParser(FUNCTIONS, lambda: "id", most_calls, customs)


def read(chunks: list[str], most_calls: int | None = None) -> Joined:
    reader = parser(most_calls)
    return joined([part for chunk in chunks for part in reader.push(chunk)] + reader.finish())


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        # https://cookbook.openai.com/articles/openai-harmony
        (f"{ANALYSIS}{TURN}<|channel|>final<|message|>2 + 2 = 4.<|return|>", "User asks. Use f.", "2 + 2 = 4.", []),
        (f"{ANALYSIS}{TURN}{CALL}<|call|>", "User asks. Use f.", "", [("f", '{"a": 1}')]),
        (f"{ANALYSIS}{TURN}{CALL}", "User asks. Use f.", "", [("f", '{"a": 1}')]),
        (
            f"{ANALYSIS}{TURN} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
            "User asks. Use f.",
            "",
            [("f", "{}")],
        ),
        (f"<|channel|>commentary<|message|>I look.<|end|>{TURN}{CALL}<|call|>", "", "I look.", [("f", '{"a": 1}')]),
        (f"{CALL}<|call|>{TURN}{CALL.replace('.f', '.g')}<|call|>", "", "", [("f", '{"a": 1}'), ("g", '{"a": 1}')]),
        (f"{ANALYSIS}{TURN}<|channel|>analysis<|message|> More.<|end|>", "User asks. Use f. More.", "", []),
        ("<|channel|>analysis<|message|>cut", "cut", "", []),
        ("No channel at all.", "", "No channel at all.", []),
        ("<|channel|>other", "", "<|channel|>other", []),
        ("", "", "", []),
        (CALL.replace(".f", ".unknown"), "", CALL.replace(".f", ".unknown"), []),
    ],
)
def test_messages(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = read([text])
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    assert read(list(text)) == whole
    for place in range(len(text)):
        assert read([text[:place], text[place:]]) == whole


FRAGMENTS = [
    *TOKENS,
    TURN,
    ANALYSIS,
    CALL,
    "analysis",
    "final",
    " to=functions.f",
    " to=functions.x",
    "json",
    "{}",
    "<|",
    " ",
    "\n",
    "é",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join), st.lists(st.integers(0, 200)), st.sampled_from([None, 1]))
def test_any_text_divided_anywhere_gives_the_same(text: str, cuts: list[int], most_calls: int | None) -> None:
    whole = read([text], most_calls)
    assert read(pieces(text, cuts), most_calls) == whole
    assert read(list(text), most_calls) == whole


def test_a_custom_tool_and_an_unknown_recipient() -> None:
    reader = parser(customs=("f",))
    answer = joined([*reader.push(CALL.replace('{"a": 1}', '{"input": "x y"}')), *reader.finish()])
    assert (answer.calls[0].custom, answer.calls[0].arguments) == (True, "x y")
    reader = parser()
    reader.push(CALL.replace(".f", ".unknown"))
    assert reader.malformed == 1


@pytest.mark.parametrize("unit", ["<|start|>", "<|channel|>", "<|message|>", "<", " ", "a", CALL])
def test_hostile_repetition_takes_linear_time(unit: str) -> None:
    read([unit] * 3000)


@pytest.mark.parametrize("shown", [True, False])
def test_thinking_is_counted_token_by_token(shown: bool) -> None:
    texts = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final"]
    reader = AnswerReader(
        AnswerFormat(Tools("harmony", FUNCTIONS), Thinking("harmony", opened=False, open_id=None, close_id=None, shown=shown))
    )
    parts = [part for text in [*texts, "<|message|>", "Yes"] for part in reader.push(text, [1])] + reader.finish()
    assert reader.reasoning_tokens == 6
    assert (joined(parts).reasoning, joined(parts).content) == ("Hm." if shown else "", "Yes")
