"""Custom tools and ``allowed_tools`` on chat completions and responses, with an engine that says what a test chooses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests import templates
from tests.fakes import FakeEngine, ids
from tests.gateway.answers import check_refused, events
from tests.gateway.answers import rendered as prompt

USER = {"role": "user", "content": "Run it."}
RUN = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
TIME = {"type": "function", "function": {"name": "get_time"}}
DAY = {"type": "function", "function": {"name": "get_day"}}
CODE = 'print("é")\nexit(1)\\'
CALL = f'<tool_call>\n{{"name": "run", "arguments": {{"input": {json.dumps(CODE)}}}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LARK = 'start: line ("\\n" line)*\nline: WORD "(" NUMBER ")"\nWORD: /[a-z]+/\nNUMBER: /[0-9]+/'
ENGINE = {"model": "m", "template": templates.HERMES, "capabilities": (*FakeEngine.capabilities, "grammar")}


@pytest.fixture
def sdk(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": RUN["custom"] | {"format": format}}  # type: ignore[operator]


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool in the form of responses."""
    inner = dict(tool[tool["type"]])
    if "grammar" in inner.get("format", {}):
        inner["format"] = {"type": "grammar", **inner["format"]["grammar"]}
    return {"type": tool["type"]} | inner


def test_a_loop_with_a_custom_tool(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    create: Any = sdk.chat.completions.create
    engine.says = ids(f"I run it.\n{CALL}\n{SECOND}")
    choice = create(model="m", messages=[USER], tools=[RUN, TIME]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I run it.")
    run, time = choice.message.tool_calls
    assert (run.type, run.custom.name, run.custom.input) == ("custom", "run", CODE)
    assert (time.type, time.function.name) == ("function", "get_time")
    assert not engine.generates[-1].grammar
    assert "Runs code." in prompt(engine)
    engine.says = ids("Done.")
    answered = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in (run, time)]
    create(model="m", messages=[USER, choice.message.model_dump(exclude_none=True), *answered], tools=[RUN, TIME])
    assert json.dumps({"input": CODE}, ensure_ascii=False) in prompt(engine)


def test_the_stream_of_a_custom_call(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(f"{CALL}{SECOND}")
    body = {"model": "m", "messages": [USER], "tools": [RUN, TIME], "stream": True}
    choices = [event["choices"][0] for event in events(client.post("/v1/chat/completions", json=body))]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    first, *others = [delta for delta in deltas if delta["index"] == 0]
    assert first.keys() == {"index", "id", "type", "custom"}
    assert (first["type"], first["custom"]["name"]) == ("custom", "run")
    assert all(other.keys() == {"index", "custom"} for other in others)
    assert "".join(delta["custom"]["input"] for delta in (first, *others)) == CODE
    assert [delta["function"]["name"] for delta in deltas if delta["index"] == 1 and "id" in delta] == ["get_time"]
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("syntax", "definition"), [("lark", LARK), ("regex", r"[a-z]+\(\d\)\n")])
@pytest.mark.parametrize("choice", [None, "required", {"type": "custom", "custom": {"name": "run"}}])
def test_a_grammar_is_guaranteed(sdk: openai.OpenAI, engine: FakeEngine, syntax: str, definition: str, choice: Any) -> None:
    engine.says = ids(CALL)
    create: Any = sdk.chat.completions.create
    create(model="m", messages=[USER], tools=[TIME, with_grammar(syntax, definition)], tool_choice=choice or openai.omit)
    grammar = engine.generates[-1].grammar
    assert "text_1" in grammar
    assert ("get_time" in grammar) == (choice in (None, "required"))
    assert ("OTHER_TEXT" in grammar) == (choice is None)
    assert f"match this {syntax} grammar" in prompt(engine)


@pytest.mark.parametrize(
    ("mode", "names", "forced"), [("auto", ["get_time"], False), ("required", ["get_time", "run"], True), ("auto", None, None)]
)
def test_only_allowed_tools_can_be_called(client: httpx.Client, engine: FakeEngine, mode: str, names: Any, forced: Any) -> None:
    tools = [RUN, TIME, DAY]
    allowed = [
        {"type": tool["type"], tool["type"]: {"name": tool[tool["type"]]["name"]}}
        for tool in tools
        if names is None or tool[tool["type"]]["name"] in names
    ]
    engine.says = ids(SECOND.replace("get_time", "get_day"))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    body = {"model": "m", "messages": [USER], "tools": tools, "tool_choice": choice}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    by_chat = engine.generates[-1]
    flatly = [{"type": each["type"], "name": each[each["type"]]["name"]} for each in allowed]
    choice = {"type": "allowed_tools", "mode": mode, "tools": flatly}
    fields = {"model": "m", "input": "Run it.", "tools": [*map(flat, tools)], "tool_choice": choice}
    told = client.post("/v1/responses", json=fields).json()
    assert told["tool_choice"] == choice
    assert (engine.generates[-1].grammar, engine.generates[-1].prompt) == (by_chat.grammar, by_chat.prompt)
    assert "get_day" in prompt(engine)
    if names is None:  # all are allowed, so nothing is forced
        assert not by_chat.grammar
        assert message["tool_calls"][0]["function"]["name"] == "get_day"
        return
    assert "get_day" not in by_chat.grammar
    assert ("OTHER_TEXT" in by_chat.grammar) != forced
    assert "tool_calls" not in message


@pytest.mark.slow
def test_responses_with_a_custom_tool(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    create: Any = sdk.responses.create
    engine.says = ids(f"{CALL}\n{SECOND}")
    tools = [flat(RUN), flat(TIME)]
    first = create(model="m", input="Run it.", tools=tools)
    run, time = first.output
    assert (run.type, run.name, run.input, run.id[:4]) == ("custom_tool_call", "run", CODE, "ctc_")
    assert time.type == "function_call"
    outputs = [
        {"type": "custom_tool_call_output", "call_id": run.call_id, "output": "1"},
        {"type": "function_call_output", "call_id": time.call_id, "output": "2"},
    ]
    asked = [{"role": "user", "content": "Run it."}, *[item.to_dict() for item in first.output], *outputs]
    engine.says = ids("Done.")
    assert create(model="m", input=asked, tools=tools).output_text == "Done."
    assert json.dumps({"input": CODE}, ensure_ascii=False) in prompt(engine)
    assert "tool\n1" in prompt(engine)
    engine.says = ids(CALL)
    with sdk.responses.stream(model="m", input="Run it.", tools=tools) as stream:  # type: ignore[arg-type]
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == CODE
    assert events[-1].response.output[0].input == CODE
    create(model="m", input="a", tools=[flat(with_grammar("lark", LARK))], tool_choice={"type": "custom", "name": "run"})
    assert "text_0" in engine.generates[-1].grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [with_grammar("lark", "start: other")]}, "tools[0].custom.format.grammar.definition", "other"),
        ({"tools": [with_grammar("regex", "(")]}, "tools[0].custom.format.grammar.definition", "cannot be"),
        ({"tools": [with_grammar("lark", "start: %json {}")]}, "tools[0].custom.format.grammar.definition", "%json"),
        ({"tools": [with_grammar("lark", "x" * 140_000)]}, "tools[0].custom.format.grammar.definition", "at most"),
        ({"tools": [with_grammar("ebnf", "a")]}, "tools[0].custom.format.grammar.syntax", "enum"),
        ({"tools": [RUN, RUN]}, "tools[1].custom.name", "called 'run'"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[1].tool_calls[0]", "needs"),
        ({"tools": [RUN], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice", "no tool 'other'"),
        ({"tools": [RUN], "tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice", "of this type"),
        (
            {"tools": [RUN], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "length",
        ),
    ],
)
def test_bad_custom_tools_are_refused(client: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(client.post("/v1/chat/completions", json={"model": "m", "messages": [USER]} | fields), param, words)


def test_refusals_of_responses_name_their_own_fields(client: httpx.Client) -> None:
    for fields, param, words in (
        ({"tools": [flat(with_grammar("lark", "start: other"))]}, "tools[0].format.definition", "`tools[0].format.definition`"),
        ({"tools": [flat(RUN), flat(RUN)]}, "tools[1].name", ""),
        ({"tools": [flat(RUN) | {"format": {"type": "grammar"}}]}, "tools[0].format", ""),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "run"}]}, "input[0].input", ""),
    ):
        check_refused(client.post("/v1/responses", json={"model": "m", "input": "a"} | fields), param, words)
