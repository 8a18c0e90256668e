"""Grammars of tool calls against llguidance: what they accept is what the parsers read, and arguments match their schemas."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer

from yardstick_llm.gateway.output.answer import THINKING, Calls, answer_grammar
from yardstick_llm.gateway.output.families import FAMILIES, Function, SchemaError
from yardstick_llm.gateway.output.parser import joined

DEEPSEEK = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]
ALL, ONE, SEPARATOR, ONE_END, ALL_END = DEEPSEEK
CONTROLS = ["<end>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", *DEEPSEEK]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
FUNCTIONS = [Function(0, "find", SCHEMA), Function(1, "now", {"type": "object", "properties": {}, "additionalProperties": False})]
NOT_TEXTS = {"find": ["days", "place"], "now": []}
ARGUMENTS: dict[str, Any] = {"city": 'a "b"\n<c>', "days": 3, "unit": "f", "place": {"name": "é"}}


@cache
def vocabulary() -> LLTokenizer:
    class Bytes:
        bos_token_id = None
        eos_token_id = 256
        tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in CONTROLS]
        special_token_ids = list(range(256, 256 + len(CONTROLS)))  # noqa: RUF012

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(llguidance.TokenizerWrapper(Bytes()), eos_token=[256])


def token_of(text: str) -> int | None:
    return 256 + CONTROLS.index(text) if text in CONTROLS else None


def tokens_of(text: str, *, controls: bool) -> list[int]:
    """The bytes of ``text``, with ids for the control tokens that it spells."""
    if not controls:
        return list(text.encode())
    for control in CONTROLS:
        text = text.replace(control, chr(0xE000 + CONTROLS.index(control)))
    return [id for sign in text for id in ([256 + ord(sign) - 0xE000] if 0xE000 <= ord(sign) < 0xE100 else sign.encode())]


def accepts(grammar: str, text: str, *, controls: bool) -> bool:
    matcher = LLMatcher(vocabulary(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokens_of(text, controls=controls)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(family: str, *, controls: bool, forced: bool, several: bool = True, **options: Any) -> str:
    calls = Calls(family, FUNCTIONS, forced, several)
    return answer_grammar(token_of if controls else lambda _: None, calls=calls, **options)


FIND, NOW = json.dumps(ARGUMENTS, ensure_ascii=False), "{}"
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "find", "arguments": {FIND}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "now", "arguments": {NOW}}}\n</tool_call>',
    "qwen3_coder": '<tool_call>\n<function=find>\n<parameter=city>\na "b"\n<c>\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    '<parameter=unit>\nf\n</parameter>\n<parameter=place>\n{"name": "é"}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek": f"{ALL}{ONE}find{SEPARATOR}{FIND}{ONE_END}{ONE}now{SEPARATOR}{NOW}{ONE_END}{ALL_END}",
    "deepseek_block": f"{ALL}{ONE}function{SEPARATOR}find\n```json\n{FIND}\n```{ONE_END}\n"
    f"{ONE}function{SEPARATOR}now\n```json\n{NOW}\n```{ONE_END}{ALL_END}",
    "llama_json": f'{{"name": "find", "parameters": {FIND}}}; {{"name": "now", "parameters": {NOW}}}',
    "pythonic": f'[find(city={json.dumps(ARGUMENTS["city"])}, days=3, unit="f", place={{"name": "é"}}), now()]',
    "mistral": f'[TOOL_CALLS][{{"name": "find", "arguments": {FIND}}}, {{"name": "now", "arguments": {NOW}}}]',
    "mistral_named": f"[TOOL_CALLS]find[ARGS]{FIND}[TOOL_CALLS]now[ARGS]{NOW}",
}
BAD = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"city": 7}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=city>\na\n</parameter>\n<parameter=days>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "deepseek": f"{ALL}{ONE}find{SEPARATOR}{{}}{ONE_END}{ALL_END}",
    "deepseek_block": f"{ALL}{ONE}find{SEPARATOR}{FIND}{ONE_END}{ALL_END}",
    "llama_json": '{"name": "find", "parameters": {"days": 3}}',
    "pythonic": "[find(days=3)]",
    "mistral": '[TOOL_CALLS][{"name": "other", "arguments": {}}]',
    "mistral_named": '[TOOL_CALLS]find[ARGS]{"city": "a", "unit": "k"}',
}

each_family = pytest.mark.parametrize("family", sorted(FAMILIES))
with_controls = pytest.mark.parametrize("controls", [False, True])
BOTH = [False, True]


@each_family
def test_the_calls_of_a_grammar_are_those_that_the_parser_reads(family: str) -> None:
    parser = FAMILIES[family].parser(NOT_TEXTS, lambda: "id")
    answer = joined([*parser.push(TWO_CALLS[family]), *parser.finish()])
    assert (answer.content, [call.name for call in answer.calls]) == ("", ["find", "now"])
    assert [json.loads(call.arguments) for call in answer.calls] == [ARGUMENTS, {}]


@each_family
@with_controls
@pytest.mark.parametrize("forced", BOTH)
def test_valid_calls_are_accepted_and_others_are_not(family: str, controls: bool, forced: bool) -> None:
    grammar = grammar_of(family, controls=controls, forced=forced)
    assert accepts(grammar, TWO_CALLS[family], controls=controls)
    assert not accepts(grammar, BAD[family], controls=controls)
    assert accepts(grammar, "Only text, a < b [1].", controls=controls) != forced
    assert accepts(grammar, "", controls=controls) != forced
    single = grammar_of(family, controls=controls, forced=forced, several=False)
    assert not accepts(single, TWO_CALLS[family], controls=controls)


@each_family
def test_integers_that_float64_lacks_are_exact(family: str) -> None:
    days = {"anyOf": [{"const": 2**60 + 1}, {"type": "null"}]}
    functions = [Function(0, "find", SCHEMA | {"properties": SCHEMA["properties"] | {"days": days}}), FUNCTIONS[1]]
    grammar = answer_grammar(token_of, calls=Calls(family, functions, True, True))
    for value in (2**60 + 1, 2**60):
        assert accepts(grammar, TWO_CALLS[family].replace("3", str(value)), controls=True) == (value % 2 == 1)


@each_family
@with_controls
def test_text_may_come_before_a_call_where_the_format_has_a_marker(family: str, controls: bool) -> None:
    grammar = grammar_of(family, controls=controls, forced=False)
    marked = FAMILIES[family].frame.marker is not None
    text = "Let me look.\n"
    assert accepts(grammar, f"{text}{TWO_CALLS[family]}", controls=controls) == marked or not marked
    assert not marked or not accepts(grammar, f"{text}{BAD[family]}", controls=controls)


@pytest.mark.slow
@each_family
@with_controls
@pytest.mark.parametrize("opened", BOTH)
def test_a_thinking_section_comes_first(family: str, controls: bool, opened: bool) -> None:
    tags = THINKING["think"]
    grammar = grammar_of(family, controls=controls, forced=True, thinking=tags, opened=opened)
    open_tag, close = "" if opened else tags.open, f"{tags.close}\n\n"
    assert accepts(grammar, f"{open_tag}\nHm.\n{close}{TWO_CALLS[family]}", controls=controls)
    assert accepts(grammar, TWO_CALLS[family], controls=controls) != opened
    assert not accepts(grammar, f"{open_tag}\nHm.\n{close}{BAD[family]}", controls=controls)
    assert not accepts(grammar, f"{open_tag}\nHm.", controls=controls)


CONSTRAINTS = ['{"grammars": [{"json_schema": {"type": "array", "items": {"type": "integer"}}}]}', "start: /\\[[0-9]\\]/"]


@with_controls
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("opened", BOTH)
def test_a_constraint_applies_behind_the_thinking_section(controls: bool, constraint: str, opened: bool) -> None:
    ids = token_of if controls else lambda _: None
    grammar = answer_grammar(ids, constraint=constraint, thinking=THINKING["think"], opened=opened)
    open_tag = "" if opened else "<think>"
    assert accepts(grammar, f"{open_tag}any [text]</think>\n\n[7]", controls=controls)
    assert not accepts(grammar, f"{open_tag}any [text]</think>\n\n7", controls=controls)
    assert accepts(grammar, "[7]", controls=controls) != opened


@each_family
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_an_answer_is_a_call_or_follows_the_constraint(family: str, constraint: str) -> None:
    grammar = grammar_of(family, controls=False, forced=False, constraint=constraint)
    assert accepts(grammar, "[7]", controls=False)
    assert accepts(grammar, TWO_CALLS[family], controls=False)
    assert not accepts(grammar, "text", controls=False)
    assert not accepts(grammar, BAD[family], controls=False)


@pytest.mark.parametrize(
    ("family", "name"), [("pythonic", "a-b"), ("pythonic", "class"), ("qwen3_coder", "a>b"), ("qwen3_coder", "")]
)
def test_a_parameter_that_the_format_cannot_name_is_refused(family: str, name: str) -> None:
    functions = [Function(0, "f", {"type": "object", "properties": {name: {"type": "string"}}})]
    with pytest.raises(SchemaError, match="cannot be named"):
        answer_grammar(token_of, calls=Calls(family, functions, forced=True, several=False))


def test_optional_parameters_of_pythonic_calls_may_be_left_out() -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    functions = [Function(0, "f", {"type": "object", "properties": properties})]
    grammar = answer_grammar(token_of, calls=Calls("pythonic", functions, forced=True, several=False))
    for text in ("[f()]", "[f(a=1)]", "[f(c=1)]", "[f(a=1, c=2)]", "[f(a=1, b=2, c=3)]"):
        assert accepts(grammar, text, controls=True)
    for text in ("[f(, a=1)]", "[f(a=1, )]", "[f(b=1, a=1)]"):
        assert not accepts(grammar, text, controls=True)


LARK = 'start: pair ("\\n" pair)*\npair: WORD "=" TEXT\nWORD: /[a-z]+/\nTEXT: "\\"" /[^"]*/ "\\""'
PATTERN = 'start: /[a-z]+="[^"]*"/'
CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def called_with(family: str, text: str) -> str:
    """A call of the custom tool ``run`` with ``text``, as models of the family write it."""
    written = json.dumps(text, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "run", "arguments": {{"input": {written}}}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function=run>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "deepseek": f'{ALL}{ONE}run{SEPARATOR}{{"input": {written}}}{ONE_END}{ALL_END}',
        "deepseek_block": f'{ALL}{ONE}function{SEPARATOR}run\n```json\n{{"input": {written}}}\n```{ONE_END}{ALL_END}',
        "llama_json": f'{{"name": "run", "parameters": {{"input": {written}}}}}',
        "pythonic": f"[run(input={written})]",
        "mistral": f'[TOOL_CALLS][{{"name": "run", "arguments": {{"input": {written}}}}}]',
        "mistral_named": f'[TOOL_CALLS]run[ARGS]{{"input": {written}}}',
    }[family]


@pytest.mark.slow
@each_family
@with_controls
@pytest.mark.parametrize("syntax", ["any", "lark", "regex"])
def test_the_text_of_a_custom_tool_follows_its_grammar(family: str, controls: bool, syntax: str) -> None:
    grammar = {"any": "", "lark": LARK, "regex": PATTERN}[syntax]
    run = Function(0, "run", CUSTOM_SCHEMA, grammar, grammar.removeprefix("start: ") if syntax == "regex" else "")
    whole = answer_grammar(token_of if controls else lambda _: None, calls=Calls(family, [run], forced=True, several=False))
    good = {"any": 'say "é" \\ now', "lark": 'a="x \\ é"\nbc=""', "regex": 'a="x \\ é"'}[syntax]
    assert accepts(whole, called_with(family, good), controls=controls)
    assert accepts(whole, called_with(family, 'a="'), controls=controls) == (syntax == "any")
    parser = FAMILIES[family].parser({"run": []}, lambda: "id", None, ["run"])
    parts = [part for sign in called_with(family, good) for part in parser.push(sign)] + parser.finish()
    (call,) = joined(parts).calls
    assert (call.name, call.custom, call.arguments) == ("run", True, good)
    assert joined(parts).content == ""
