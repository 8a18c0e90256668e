"""Parsers of tool calls, thinking sections and inputs of custom tools: documented outputs, divided anywhere, and broken ones."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.output.test_grammar import ARGUMENTS, NOT_TEXTS, TWO_CALLS
from yardstick_llm.gateway.output.answer import THINKING, Split, ThinkingParser
from yardstick_llm.gateway.output.families import FAMILIES
from yardstick_llm.gateway.output.parser import CallArguments, CallBegin, CallCut, Content, CustomInput, Joined, ToolParser, joined

FUNCTIONS = {"get_weather": ["days", "exact", "places", "note"], "get_time": [], "f": [], "g": ["n"]}

WEATHER = {"location": "San Francisco, CA", "unit": "celsius"}


def parser_of(family: str, most_calls: int | None = None) -> ToolParser:
    return FAMILIES[family].parser(FUNCTIONS, lambda: "id", most_calls)


def read(family: str, chunks: Sequence[str], most_calls: int | None = None) -> Joined:
    parser = parser_of(family, most_calls)
    parts = [part for chunk in chunks for part in parser.push(chunk)] + parser.finish()
    begun: set[int] = set()
    for part in parts:  # a call's name comes before its arguments, and calls come one after the other
        if isinstance(part, CallBegin):
            assert part.call == len(begun)
            begun.add(part.call)
        if isinstance(part, CallArguments):
            assert part.call == len(begun) - 1
    assert len(begun) == parser.calls
    return joined(parts)


def said(family: str, text: str, most_calls: int | None = None) -> tuple[str, list[tuple[str, Any]]]:
    answer = read(family, [text], most_calls)
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


# What the models' authors document, with the content and the calls that it stands for.
DOCUMENTED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # Hermes 2 Pro and Qwen2.5: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B, https://qwen.readthedocs.io
    (
        "hermes",
        '<tool_call>\n{"arguments": {"location": "San Francisco, CA", "unit": "celsius"}, "name": "get_weather"}\n</tool_call>',
        "",
        [("get_weather", WEATHER)],
    ),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA", "unit": "celsius"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [("get_weather", WEATHER), ("get_time", {})],
    ),
    # Qwen3-Coder: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja
    (
        "qwen3_coder",
        "I check.\n\n<tool_call>\n<function=get_weather>\n<parameter=location>\nSan Francisco, CA\n</parameter>\n<parameter=days>"
        '\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=places>\n["a", {"b": 1}]\n</parameter>\n'
        "<parameter=note>\nnot JSON\n</parameter>\n</function>\n</tool_call>",
        "I check.",
        [
            (
                "get_weather",
                {"location": "San Francisco, CA", "days": 3, "exact": True, "places": ["a", {"b": 1}], "note": "not JSON"},
            )
        ],
    ),
    (
        "qwen3_coder",
        '<function=get_time>\n</function>\n<function=f>\n<parameter=a>\nline "1"\n\nline 3\n\n<parameter=b>\n7\n</function>',
        "",
        [("get_time", {}), ("f", {"a": 'line "1"\n\nline 3\n', "b": "7"})],
    ),
    # DeepSeek-V3 and R1, V3.1: https://huggingface.co/deepseek-ai/DeepSeek-V3, DeepSeek-V3.1, tokenizer_config.json
    (
        "deepseek_block",
        "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "San Francisco, CA", "unit": "celsius"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
        "get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me look.",
        [("get_weather", WEATHER), ("get_time", {})],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "1"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>"
        '{"n": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("f", {"a": "1"}), ("g", {"n": 2})],
    ),
    # Llama 3.1 to 3.3: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
    ("llama_json", '{"name": "get_weather", "parameters": ' + json.dumps(WEATHER) + "}", "", [("get_weather", WEATHER)]),
    (
        "llama_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "1"}}; {"name": "g", "parameters": {"n": 2}}',
        "",
        [("f", {"a": "1"}), ("g", {"n": 2})],
    ),
    # Llama 3.2 and 4: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
    (
        "pythonic",
        "[get_weather(location='San Francisco, CA', unit=\"celsius\"), "
        "g(n=[1, 2.5, (True, None),], m={'a': \"it's \\u00e9\\n\"}), get_time()]",
        "",
        [("get_weather", WEATHER), ("g", {"n": [1, 2.5, [True, None]], "m": {"a": "it's é\n"}}), ("get_time", {})],
    ),
    ("pythonic", '<|python_start|>[f(a="x")]<|python_end|>', "", [("f", {"a": "x"})]),
    # Mistral 7B v0.3 to Small 3.1, and Small 3.2 and later: https://docs.mistral.ai, mistral-common
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"location": "San Francisco, CA", "unit": "celsius"}}, '
        '{"name": "get_time", "arguments": {}, "id": "VvvODy9mT"}]',
        "",
        [("get_weather", WEATHER), ("get_time", {})],
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"location": "San Francisco, CA", "unit": "celsius"}'
        "[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{}",
        "Sure.",
        [("get_weather", WEATHER), ("f", {})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), DOCUMENTED)
def test_a_documented_output_is_read_however_it_is_divided(family: str, text: str, content: str, calls: list[Any]) -> None:
    assert said(family, text) == (content, calls)
    whole = read(family, [text])
    assert read(family, list(text)) == whole
    for place in range(len(text)):
        assert read(family, [text[:place], text[place:]]) == whole


# Fragments of all formats, whole and broken, and what may stand between them.
FRAGMENTS = [
    *(text for _, text, _, _ in DOCUMENTED),
    *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"),
    *("</parameter>", "</function>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "```json\n"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", '{"name": ', '"f"', ', "arguments": ', '{"a": [1, "', '"}'),
    *("[", "]", "}", "{", "f(", "a=", "'", '"', ")", "\\", "\n", " ", ";", ",", "text", "<", "<tool", "é", "😀"),
    *("\\u12", "\\x", "null", "1e", "\0", "\ud7ff"),
]
TEXTS = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.text(max_size=60))


@given(st.sampled_from(sorted(FAMILIES)), TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from([None, 1]))
def test_any_text_divided_anywhere_gives_the_same_parts_and_loses_nothing(
    family: str, text: str, cuts: list[int], most_calls: int | None
) -> None:
    whole = read(family, [text], most_calls)
    assert read(family, pieces(text, cuts), most_calls) == whole
    assert read(family, list(text), most_calls) == whole
    parser = parser_of(family, most_calls)
    parser.push(text)
    parser.finish()
    if not parser.calls:  # the text of a call that is cut is neither content nor a call
        assert whole.content == text


@given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(DOCUMENTED), st.data())
def test_an_output_that_is_cut_anywhere_keeps_what_came_before(
    family: str, documented: tuple[str, str, str, list[Any]], data: Any
) -> None:
    family, text, _, calls = documented
    cut = text[: data.draw(st.integers(0, len(text)))]
    answer = read(family, [cut])
    assert [call.name for call in answer.calls] == [name for name, _ in calls][: len(answer.calls)]
    for call, (_, arguments) in zip(answer.calls[:-1], calls, strict=False):
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>get_weather</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 7}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek_block", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"),
        ("llama_json", '<|python_tag|>brave_search.call(query="x")'),
        ("pythonic", "<|python_start|>[unknown(a=1)]"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS] nothing"),
    ],
)
def test_a_malformed_call_is_content_and_is_counted(family: str, text: str) -> None:
    parser = parser_of(family)
    answer = joined([*parser.push(text), *parser.finish()])
    assert (answer.content, answer.calls) == (text, [])
    assert parser.malformed == 1


@pytest.mark.parametrize(
    ("family", "text"), [("llama_json", '{"name": "Bob", "age": 3}'), ("llama_json", '{"a": 1}'), ("pythonic", "[1] says so")]
)
def test_an_answer_that_only_resembles_a_call_is_not_counted_as_malformed(family: str, text: str) -> None:
    parser = parser_of(family)
    assert joined([*parser.push(text), *parser.finish()]) == Joined(text)
    assert parser.malformed == 0


def test_a_call_after_a_malformed_one_is_read() -> None:
    text = '<tool_call>{"name": 7}</tool_call> and <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert said("hermes", text) == ('<tool_call>{"name": 7}</tool_call> and', [("f", {})])


def test_arguments_arrive_before_the_call_is_complete() -> None:
    parser = parser_of("hermes")
    assert parser.push('<tool_call>{"name": "f", ') == []
    begin, first = parser.push('"arguments": {"a": "b')
    assert begin == CallBegin(0, "id", "f")
    assert first == CallArguments(0, '{"a": "b')
    assert parser.push('c"}') == [CallArguments(0, 'c"}')]


def test_what_follows_broken_arguments_is_content() -> None:
    parser = parser_of("hermes")
    begin, arguments, cut, content = parser.push('<tool_call>{"name": "f", "arguments": {"a": 1]}} rest')
    assert (begin, arguments) == (CallBegin(0, "id", "f"), CallArguments(0, '{"a": 1'))
    assert (cut, content) == (CallCut(0), Content("]}} rest", 45))
    assert (parser.calls, parser.complete, parser.malformed) == (1, 0, 1)


@pytest.mark.parametrize("family", [family for family in TWO_CALLS if not family.startswith("deepseek")])
@pytest.mark.parametrize("forced", [False, True])
def test_only_calls_with_all_arguments_are_calls(family: str, forced: bool) -> None:
    """Wherever an answer of two calls is cut. If calls are forced, there is no text beside them."""
    text, called, most = TWO_CALLS[family], [("find", ARGUMENTS), ("now", {})], 0
    for end in range(len(text) + 1):
        parser = FAMILIES[family].parser(NOT_TEXTS, lambda: "id")
        parser.forced = forced
        parts = [*parser.push(text[:end]), *parser.finish()]
        answer = joined(parts)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == called[: len(answer.calls)]
        assert most <= len(answer.calls) <= most + 1
        assert len(answer.calls) == parser.complete == parser.calls - sum(isinstance(part, CallCut) for part in parts)
        assert not (forced and answer.content)
        most = len(answer.calls)
    assert most == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "unit", ["<tool_call>", "[TOOL_CALLS]", "[", '{"name": "f", "arguments": ', " ", "<function=f><parameter=a>", "f(a=["]
)
def test_hostile_repetition_takes_linear_time(family: str, unit: str) -> None:
    began = time.thread_time()
    read(family, [unit] * (20_000 if unit == " " else 1500))
    assert time.thread_time() - began < 5


TAGS = THINKING["think"]
SECTION_TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "a", "😀"]), max_size=9).map(
    "".join
)


def read_sections(chunks: list[str], *, opened: bool) -> Split:
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
    assert read_sections([text], opened=opened) == read_sections(list(text), opened=opened) == Split(reasoning, content)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """``text``, divided at ``cuts``."""
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    return [text[begin:end] for begin, end in pairwise(places)]


@given(SECTION_TEXTS, st.booleans(), st.lists(st.integers(0, 60), max_size=6))
def test_sections_divided_anywhere_are_the_same(text: str, opened: bool, cuts: list[int]) -> None:
    whole = read_sections([text], opened=opened)
    assert read_sections(pieces(text, cuts), opened=opened) == read_sections(list(text), opened=opened) == whole
    kept = "".join(char for char in whole.reasoning + whole.content if char not in "\n ")
    lost = sorted("".join(char for char in text if char not in "\n ").replace("<think>", "", 1).replace("</think>", "", 1))
    assert sorted(kept) in (lost, sorted(char for char in text if char not in "\n ")) or len(kept) >= len(lost)


def read_input(chunks: list[str]) -> str:
    reader = CustomInput()
    return "".join(map(reader.push, chunks))


@given(st.text(max_size=30), st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_divided_anywhere_is_decoded(text: str, ascii_only: bool, indent: int | None, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert read_input(pieces(arguments, cuts)) == text
    assert read_input(list(arguments)) == text


@given(st.text(alphabet='{}":\\input u0dD8é\n', max_size=40))
def test_other_arguments_give_the_same_in_any_pieces(text: str) -> None:
    for arguments in (text, '{"input": "' + text):
        assert read_input(list(arguments)) == read_input([arguments])


@pytest.mark.parametrize("arguments", ['{"text": "a"}', '{"input": 7}', '{"in": 1}', "[1]"])
def test_arguments_of_another_form_are_passed_on(arguments: str) -> None:
    assert read_input(list(arguments)) == arguments
