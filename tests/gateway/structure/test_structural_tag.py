"""Structural tags against llguidance: what their grammars accept, and forms that are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.structure.grammar import GrammarTextError
from gateway.structure.structural_tag import of_structural_tag
from tests.gateway.tools.test_grammar import accepts, token_of

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": INTEGER}
ANY = {"type": "any_text"}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], triggers: list[str], **options: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **options}


def separated(*tags: dict[str, Any], **options: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ", ", **options}


F, G = tag("<function=f>", JSON, "</function>"), tag("<function=g>", {"type": "regex", "pattern": "[a-z<]+"}, "</function>")
CALL = tag("<tool_call>\n", JSON, "\n</tool_call>")
THINK = tag("<think>", ANY, "</think>")
FUNCTIONS = triggered(F, G, triggers=["<function="])
CALLS = triggered(CALL, triggers=["<tool_call>"])
ONE = triggered(F, triggers=["<fun"], at_least_one=True, stop_after_first=True)

F1, G1, CALL1 = '<function=f>{"a": 1}</function>', "<function=g>b<c</function>", '<tool_call>\n{"a": 1}\n</tool_call>'
ACCEPTED = [
    (
        FUNCTIONS,
        ["", "text <f", F1, f"a {F1} b{G1}{F1} c", "<function"],
        ["<function=", "<function=h>", "<function=f>{}</function>"],
    ),
    (FUNCTIONS, [], [f"a {F1} <function= b", "<function=g></function>"]),
    (CALLS, ["", "a", CALL1, f"a{CALL1}b{CALL1}"], ["<tool_call>", "<tool_call>\n{}\n</tool_call>", f"{CALL1}<tool_call>"]),
    (triggered(F, triggers=["<function="], at_least_one=True), [F1, f"a{F1}b{F1}c"], ["", "a"]),
    (triggered(F, triggers=["<function="], stop_after_first=True), ["", "a", f"a{F1}"], [f"{F1}b", f"{F1}{F1}"]),
    (ONE, [F1, f"a{F1}"], ["", "a", f"{F1}b", f"{F1}{F1}"]),
    (separated(F, G), ["", F1, f"{F1}, {G1}, {F1}"], [f"{F1} {F1}", f"{F1}, ", "a"]),
    (separated(F, at_least_one=True), [F1, f"{F1}, {F1}"], [""]),
    (separated(F, stop_after_first=True), [F1, ""], [f"{F1}, {F1}"]),
    (
        {"type": "sequence", "elements": [THINK, {"type": "const_string", "value": "ok "}, JSON]},
        ['<think>a\n<b></think>ok {"a": 1}', '<think></think>ok {"a":2}'],
        ['<think>a</think>{"a": 1}', 'ok {"a": 1}', "<think>a"],
    ),
    (
        {"type": "sequence", "elements": [{"type": "optional", "content": THINK}, FUNCTIONS]},
        [f"<think>a</think>b{F1}", F1, ""],
        ["<think>a</think><function="],
    ),
    ({"type": "or", "elements": [JSON, {"type": "regex", "pattern": "no+"}]}, ['{"a": 1}', "noo"], ["", 'no{"a": 1}']),
    ({"type": "plus", "content": F}, [F1, F1 + F1], ["", f"{F1}a"]),
    ({"type": "star", "content": F}, ["", F1 + F1], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["a", "bba"], ["", "ab"]),
    (tag("[", ANY, ["]", "!"]), ["[]", "[a!", "[a b]"], ["[a", "[a] b"]),
    (tag("<a>", FUNCTIONS, "</a>"), [f"<a>b{F1}c</a>", "<a></a>"], [f"<a>{F1}", "<a><function=</a>", "<a></a>b"]),
    ({"type": "any_text", "excludes": ["bad"]}, ["", "good ba"], ["a bad b"]),
]


@pytest.mark.parametrize(("format", "good", "bad"), ACCEPTED)
@pytest.mark.parametrize("controls", [False, True])
def test_the_outputs_of_a_format(format: dict[str, Any], good: list[str], bad: list[str], controls: bool) -> None:
    grammar = of_structural_tag({"format": format}, token_of if controls else lambda _: None)
    assert [text for text in good if not accepts(grammar, text, controls=controls)] == []
    assert [text for text in bad if accepts(grammar, text, controls=controls)] == []


def test_the_older_form() -> None:
    structures = [{"begin": "<function=f>", "schema": INTEGER, "end": "</function>"}]
    grammar = of_structural_tag({"structures": structures, "triggers": ["<function="]}, token_of)
    assert accepts(grammar, f"a {F1} b", controls=True)
    assert not accepts(grammar, "a <function=f>{} b", controls=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs `format`"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format.type is one of"),
        ({"format": "any"}, "format.type is one of"),
        ({"format": {"type": "sequence", "elements": [ANY, JSON]}}, r"format.elements\[0\] has any text"),
        ({"format": {"type": "star", "content": ANY}}, "format.content has any text"),
        ({"format": tag("<a>", JSON, [])}, "format.end is empty"),
        ({"format": {"type": "tag", "begin": "<a>"}}, "format: Object missing required field `content`"),
        ({"format": {"type": "regex"}}, "format.pattern is not a text"),
        ({"format": {"type": "json_schema", "json_schema": 7}}, "is not a schema"),
        ({"format": JSON | {"style": "qwen_xml"}}, "style is not supported"),
        ({"format": triggered(F, triggers=["<other"])}, r"tags\[0\].begin begins with none"),
        ({"format": triggered(F, triggers=["<fun", "x"])}, "no tag begins with the trigger 'x'"),
        ({"format": triggered(F, triggers=[])}, "needs `tags`"),
        ({"format": triggered(F | {"begin": "a<think>"}, triggers=["a<think>"])}, "text before a control token"),
        ({"format": triggered(F, triggers=["<fun"], other=True)}, "unknown field"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, r"structures\[0\] needs"),
    ],
)
def test_what_cannot_be_followed_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarTextError, match=words):
        of_structural_tag(given, token_of)


def test_the_number_of_rules_is_bounded() -> None:
    nested: dict[str, Any] = ANY
    for _ in range(30):
        nested = tag("<", nested, [">", "!"])
    with pytest.raises(GrammarTextError, match="more than 2048 rules"):
        of_structural_tag({"format": nested}, token_of)
    many = triggered(*[tag(f"<{place}>", JSON, "</>") for place in range(3000)], triggers=["<"])
    with pytest.raises(GrammarTextError, match="more than 2048 rules"):
        of_structural_tag({"format": many}, token_of)
    with pytest.raises(GrammarTextError, match="length <= 128"):
        of_structural_tag({"format": triggered(F, triggers=["<"] * 129)}, token_of)


KINDS = [
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "optional",
    "star",
    "plus",
    "tag",
    "other",
]
VALUES = st.sampled_from(["", "a", "<think>", "x<think>", "(", "[a-z]+", "start: /a/", None, 7, True, {}, [], ["a"], ["a", 7]])
SOME_TAG = st.fixed_dictionaries({"type": st.just("tag"), "begin": VALUES, "content": st.just(JSON), "end": VALUES})
FORMATS = st.recursive(
    VALUES | st.just(JSON) | st.just(ANY),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from([*KINDS, "triggered_tags", "tags_with_separator"])},
        optional={
            **dict.fromkeys(
                ("value", "json_schema", "pattern", "grammar", "excludes", "begin", "separator", "at_least_one"), VALUES
            ),
            "elements": st.lists(inner, max_size=3),
            "content": inner,
            "end": VALUES,
            "triggers": st.lists(VALUES, max_size=2) | VALUES,
            "tags": st.lists(SOME_TAG, max_size=2) | VALUES,
        },
    ),
    max_leaves=6,
)


@given(FORMATS)
def test_any_value_is_a_grammar_or_refused(format: Any) -> None:
    for value in ({"format": format}, format if isinstance(format, dict) else {"structures": format, "triggers": format}):
        with suppress(GrammarTextError):
            assert of_structural_tag(value, token_of)
