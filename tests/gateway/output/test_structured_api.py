"""Constraints of the output in requests: each form becomes a grammar that the engine gets, or a 400 that names the place."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.conftest import Start, metric
from tests.gateway.output.test_grammar import accepts
from tests.processes import wait_until
from yardstick_llm.gateway.schemas.generation import MAX_ALLOWED_TOKENS

ID = 1234567890123456789
"""An integer that float64 lacks."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "completions": {"prompt": [5, 6], "max_tokens": 4},
}


def post(client: httpx.Client, path: str = "completions", /, **fields: Any) -> httpx.Response:
    return client.post(f"/v1/{path}", json={"model": "fake"} | BODIES[path] | fields)


def refusal(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 3000
    return error["param"], error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"required":["a"]'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"required":["a"]'),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, '"required":["a"]'),
        ({"response_format": {"type": "json", "value": SCHEMA}}, '"required":["a"]'),
        ({"response_format": {"type": "regex", "value": "[ab]"}}, "[ab]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}, '"a"'),
        ({"structured_outputs": {"json": SCHEMA}}, '"required":["a"]'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"required":["a"]'),
        ({"structured_outputs": {"json_object": True}}, '"type":"object"'),
        ({"structured_outputs": {"regex": r"^\d+$"}}, "start: /^[0-9]+$/"),
        ({"structured_outputs": {"choice": ["yes", 'a "b"\n']}}, r'"a \"b\"\n"'),
        ({"structured_outputs": {"grammar": 'start: "a" | <|im_start|>'}}, "<|im_start|>"),
        ({"guided_json": SCHEMA}, '"required":["a"]'),
        ({"guided_regex": "[ab]"}, "[ab]"),
        ({"guided_choice": ["yes", "no"]}, '"yes"'),
        ({"guided_grammar": 'root ::= "x" [0-9]+'}, 'start: "x"'),
        ({"json_schema": json.dumps(SCHEMA)}, '"required":["a"]'),
        ({"regex": "a/b"}, "a\\/b"),
        ({"ebnf": 'root ::= "y"'}, '"y"'),
        ({"grammar": 'root ::= "z"'}, '"z"'),
    ],
)
def test_each_form_reaches_the_engine_as_a_grammar(
    engine: FakeEngine, client: httpx.Client, path: str, fields: dict[str, Any], part: str
) -> None:
    answer = post(client, path, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-yardstick-ignored" not in answer.headers
    (asked,) = engine.generates
    assert part in asked.grammar


def test_a_long_request_keeps_its_constraint(engine: FakeEngine, client: httpx.Client) -> None:
    """A body that a worker decodes."""
    schema = SCHEMA | {"description": "x" * 60_000}
    answer = post(client, "chat/completions", response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert answer.status_code == 200, answer.text
    assert '"required":["a"]' in engine.generates[0].grammar


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None, "structured_outputs": None}]
)
def test_text_is_free(engine: FakeEngine, client: httpx.Client, fields: dict[str, Any]) -> None:
    assert post(client, **fields).status_code == 200
    assert engine.generates[0].grammar == ""


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "both constrain"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "both constrain"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs `json_schema`"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "goes with the type 'json_object'"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "thing"}}},
            "response_format.schema",
            "Invalid type: thing",
        ),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "is a JSON Schema"),
        ({"response_format": {"type": "json_object", "value": "[ab]"}}, "response_format.value", "is a JSON Schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid enum value"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "JSON Schema"),
        (
            {"guided_json": {"type": "object", "properties": {"b": {"type": "array", "uniqueItems": True}}}},
            "guided_json.properties.b",
            "`uniqueItems` is not supported",
        ),
        ({"guided_json": {"anyOf": [{}, {"not": {}}]}}, "guided_json.anyOf[1]", "`not` is not supported"),
        (
            {"guided_json": {"$ref": "https://example.com/s.json"}},
            "guided_json",
            "'https://example.com/s.json' leads out of the schema",
        ),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "because a `$ref` leads only to itself"),
        (
            {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
            "guided_json",
            "because a `$ref` leads only to itself",
        ),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {}}}, "guided_json", "'/$defs/a' does not exist"),
        ({"guided_json": {"type": "string", "format": "nonsense"}}, "guided_json", "Unknown format: nonsense"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json", "look-around"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}, "guided_json", "cannot be followed"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": r"(a)\1"}, "guided_regex", "backreferences"),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": 'root ::= "a" nothing'}, "guided_grammar", "not found"),
        ({"guided_grammar": "start: <|nothing|>"}, "guided_grammar", "unknown special token"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
        ({"allowed_token_ids": [9999]}, "allowed_token_ids", "not a token"),
        ({"allowed_token_ids": [1] * (MAX_ALLOWED_TOKENS + 1)}, "allowed_token_ids", "length <="),
        ({"bad_words": [" "]}, "bad_words[0]", "empty"),
        ({"bad_words": ["a"] * 257}, "bad_words", "length <="),
        ({"bad_words": ["xq" * 100] * 200}, "bad_words", "at most 4096"),
    ],
)
def test_what_is_refused(client: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    found, message = refusal(post(client, **fields))
    assert found == param
    assert words in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": nested(70)}, "levels deep"),
        ({"guided_json": '{"items":' * 11_000 + "{}" + "}" * 11_000}, "not JSON"),
        ({"guided_json": {"enum": list(range(30_000))}}, "more than 20000 values"),
        ({"guided_json": {"enum": ["x" * 100] * 2000}}, "bytes; at most 131072"),
        ({"guided_regex": "a" * 140_000}, "bytes; at most 131072"),
        ({"guided_choice": ["x" * 100_000, "y" * 100_000]}, "bytes; at most 131072"),
        ({"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}, ""),
        ({"guided_regex": "(.*a.{200}|.*b.{200})+" * 20}, ""),
        ({"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}}, ""),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}}, ""),
        ({"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(6)]} for i in range(12)]}}, ""),
        ({"guided_grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "cannot be"),
        ({"guided_grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000}, "cannot be"),
        (
            {"guided_grammar": 'root ::= r0\nr6000 ::= "b"\n' + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(6000))},
            "longer than",
        ),
        ({"guided_grammar": "start: a\na: b b b b\nb: c c c c\nc: d d d d\nd: " + '("e" | "")' * 4}, ""),
    ],
)
def test_hostile_constraints_cost_little(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    """Refused with the place, or accepted within the time limit; the event loop answers others meanwhile."""
    began = time.monotonic()
    answer = post(client, **fields)
    assert time.monotonic() - began < 15  # the limits are in CPU time, and the machine may be busy
    if answer.status_code == 200:
        assert not words
    else:
        _, message = refusal(answer)
        assert words in message
    assert client.get("/livez").status_code == 200


def chained(hops: int, link: Any) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a row. ``link``: makes one of the reference to the next."""
    names = [f"#/$defs/a{place}" for place in range(1, hops + 1)]
    return {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{hops}": {"type": "null"}} | {f"a{i}": link({"$ref": n}) for i, n in enumerate(names)},
    }


FATAL = [
    (
        {"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775803},
        "too many digits to be enforced exactly",
    ),
    (chained(1000, lambda next: {"properties": {"x": next}, "required": ["x"]}), "levels deep through `$ref`"),
    (chained(1000, lambda next: {"allOf": [next]}), "levels deep through `$ref`"),
    # The first properties refer to the last definitions, so no path of this search is long.
    (
        {
            "properties": {f"p{i}": {"$ref": f"#/$defs/a{i}"} for i in range(1000)},
            "$defs": chained(1000, lambda next: {"properties": {"x": next}, "required": ["x"]})["$defs"],
        },
        "nested too deeply",
    ),
]


@pytest.mark.parametrize(("schema", "words"), FATAL)
def test_a_schema_that_ends_a_process_is_refused_each_time(client: httpx.Client, schema: Any, words: str) -> None:
    ended = [f'yardstick_text_workers_ended_total{{reason="{reason}"}}' for reason in ("crash", "memory", "slow")]
    before = [metric(client, name) for name in ended]
    for _ in range(6):  # each text worker
        param, message = refusal(post(client, guided_json=schema))
        assert (param, words in message) == ("guided_json", True), message
    assert [metric(client, name) for name in ended] == before


PAIR = [{"type": "integer"}, {"type": "string"}]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["5"], ["-5"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", "-5"], ["a"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": -3}, ["-5"], ["5", "-2"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["18446744073709551615"], ["-5"]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["0.5", "-5"], ["a"]),
        ({"enum": [2**53, 2**60]}, [str(2**53), str(2**60)], [str(2**53 + 1)]),
        ({"enum": [0.1, 123456.789012345]}, ["0.1", "123456.789012345"], ["0.2"]),
        ({"properties": {"enum": {"default": 2**60 + 1}}, "required": ["enum"]}, ['{"enum": 1}'], ["{}"]),
        ({"prefixItems": PAIR, "additionalItems": False, "type": "array"}, ['[1, "a"]'], ['[1, "a", 3]']),
        ({"prefixItems": PAIR, "additionalItems": {"type": "null"}, "type": "array"}, ['[1, "a", null]'], ['[1, "a", 3]']),
        ({"items": PAIR, "additionalItems": False, "type": "array"}, ['[1, "a"]'], ['[1, "a", 3]']),
        ({"$ref": "#/$defs/Größe", "$defs": {"Größe": {"type": "integer"}}}, ["1"], ['"a"']),
        ({"$ref": "#/definitions/A[B C]", "definitions": {"A[B C]": {"type": "integer"}}}, ["1"], ['"a"']),
        ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"type": "integer"}}}, ["1"], ['"a"']),
        ({"$schema": "https://example.com/own", "type": "integer"}, ["1"], ['"a"']),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}, ["1"], ['"a"']),
        ({"type": "array"}, ["[1, 2]", "[\n    1,\n    2\n]"], ["[1,  2]", "[\n\n1]", f"[\n{' ' * 21}1]"]),
        ({"type": "string", "pattern": '^[^"]+$'}, ['"a\\\\"', '"\\n"'], ['"\\""', '"a\\"b"']),
        ({"type": "string", "pattern": r"^[^\\]/[^]x]$"}, ['"\\"/\\n"'], ['"\\\\/a"', '"a/]"', '"a/x"']),
        ({"enum": [ID, 1, "x"], "type": "integer"}, [str(ID), "1"], [str(ID - 1), '"x"', "1234567890123456768"]),
        ({"const": {"ids": [1, -ID]}}, [f'{{"ids": [1, {-ID}]}}'], [f'{{"ids": [1, {-ID - 1}]}}']),
        ({"enum": [0.5, 98693.53375553725]}, ["0.5", "98693.53375553725"], ["98693.53375553726"]),
        (
            {
                "type": ["object", "null"],
                "$defs": {"id": {"enum": [ID, ID + 1]}, "name": {"type": "string", "maxLength": 3}},
                "properties": {
                    "first": {"$ref": "#/$defs/name"},
                    "ids": {"type": "array", "items": {"$ref": "#/$defs/id"}, "minItems": 2, "maxItems": 3},
                    "size": {"anyOf": [{"const": ID}, {"type": "boolean"}]},
                },
                "required": ["ids"],
            },
            [
                "null",
                f'{{"ids":[{ID},{ID + 1}]}}',
                f'{{"first": "a", "ids": [{ID}, {ID}], "size": {ID}}}',
                f'{{"ids":[{ID},\n {ID}],"size":true}}',
            ],
            [
                "{}",
                f'{{"ids":[{ID}]}}',
                f'{{"ids":[{ID},{ID + 2}]}}',
                f'{{"first":"abcd","ids":[{ID},{ID}]}}',
                f'{{"ids":[{ID},{ID}],}}',
            ],
        ),
        (
            {"properties": {"a": {"const": ID}, "b": True}},
            ["{}", f'{{"a":{ID}}}', '{"b":[1]}', f'{{"a":{ID},"b":0}}'],
            ['{"b":0,"a":1}', '{"a":1}'],
        ),
        ({"type": "array", "x-guidance": {"whitespace_flexible": False}}, ["[1,2]"], ["[1, 2]"]),
        ({"items": {"const": ID}, "x-guidance": {"whitespace_flexible": False}}, [f"[{ID},{ID}]", "[]"], [f"[{ID}, {ID}]"]),
        ({"type": "array", "x-guidance": {"whitespace_pattern": "[ ]{0,2}"}}, ["[1,  2]"], ["[1,\n2]"]),
    ],
)
def test_what_a_schema_allows(engine: FakeEngine, client: httpx.Client, schema: Any, good: list[str], bad: list[str]) -> None:
    lark = f'start: "" /[~"]?/ %json {json.dumps(schema)} // a comment with "\n'
    for fields in ({"guided_json": schema}, {"guided_grammar": lark}):
        answer = post(client, **fields)
        assert answer.status_code == 200, answer.text
        grammar = engine.generates[-1].grammar
        assert [text for text in (*good, *bad) if accepts(grammar, text, controls=False)] == good


def test_a_schema_is_one_where_a_grammar_has_it_as_such(engine: FakeEngine, client: httpx.Client) -> None:
    grammar = 'start: "%json {}" | /%json [{][}]/ // %json {}\n'
    assert post(client, guided_grammar=grammar).status_code == 200
    assert engine.generates[0].grammar == grammar
    assert "cannot be read" in refusal(post(client, guided_grammar="start: %json {]"))[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**53 + 1},
        {"allOf": [{"const": ID}, {"type": "integer"}]},
        {"properties": {"id": {"const": ID}}, "patternProperties": {"^x": {"type": "null"}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"id": {"const": ID}, "next": {"$ref": "#/$defs/node"}}}}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 1000, "$defs": {"a": {"enum": [ID, *range(2000)]}}},
        {"properties": {"id": {"const": ID}}, "required": 3},
        {"items": {"anyOf": [{"type": "integer", "exclusiveMaximum": 2**54}]}},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(client: httpx.Client, schema: Any) -> None:
    for name, value in {"guided_json": schema, "guided_grammar": f"start: %json {json.dumps(schema)}"}.items():
        param, message = refusal(post(client, **{name: value}))
        reasons = ["too many digits to be enforced exactly"]
        if "anyOf" in schema:  # a million bytes when it is spelled out, which takes half of the time limit
            reasons.append("takes longer than 1 s")
        assert (param, any(reason in message for reason in reasons)) == (name, True), message


def test_other_models_refuse(start: Start) -> None:
    assert refusal(post(start(FakeEngine(capabilities=("score", "generate"))), regex="a"))[0] == "model"


def test_words_and_tokens_reach_the_engine(engine: FakeEngine, client: httpx.Client) -> None:
    assert post(client, "chat/completions", bad_words=["Yes", " quick"], allowed_token_ids=[5, 7]).status_code == 200
    sampling = engine.generates[0].sampling
    assert sampling.allowed_token_ids == (5, 7)
    assert sampling.bad_words == tuple(tuple(ids(word)) for word in ("Yes", " Yes", "quick", " quick"))


def test_structured_requests_are_counted(client: httpx.Client) -> None:
    name = 'yardstick_structured_prompts_total{model="fake"}'
    before = metric(client, name)
    assert post(client, regex="a").status_code == 200
    wait_until(lambda: metric(client, name) == before + 1)
