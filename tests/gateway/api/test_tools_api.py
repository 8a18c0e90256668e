"""Tools and thinking on ``/v1/chat/completions``, with an engine that says what a test chooses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests import templates
from tests.fakes import EOS, FakeEngine, ids, library
from tests.gateway.answers import check_refused, events, rendered
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.output import test_grammar
from yardstick_llm.engine import wire

MODELS = {
    **templates.FAMILY_OF,
    "thinking": templates.THINKING,
    "always": templates.ALWAYS_THINKING,
    "effort": templates.EFFORT,
    "texts": templates.ARGUMENTS_AS_TEXT,
    "unknown": templates.TOOLS_IN_NO_FORMAT,
    "plain": FakeEngine.template,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
USER = {"role": "user", "content": "What is the weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@dataclass
class Server:
    """A gateway before one engine for each of :data:`MODELS`."""

    engines: dict[str, FakeEngine]
    client: httpx.Client

    def says(self, model: str, text: str) -> None:
        self.engines[model].says = ids(text)

    def post(self, model: str, text: str | None = None, **fields: Any) -> httpx.Response:
        if text is not None:
            self.says(model, text)
        return self.client.post(
            "/v1/chat/completions", json={"model": model, "messages": [USER], "tools": [WEATHER, TIME]} | fields
        )

    def answer(self, model: str, text: str | None = None, **fields: Any) -> dict[str, Any]:
        response = self.post(model, text, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def prompt(self, model: str) -> str:
        return rendered(self.engines[model])

    def request(self, model: str) -> wire.Generate:
        return self.engines[model].generates[-1]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    able = (*FakeEngine.capabilities, "grammar")
    engines = {name: FakeEngine(model=name, template=template, capabilities=able) for name, template in MODELS.items()}
    with gateways() as start:
        client = start(*engines.values())
        yield Server(engines, client)


TWO_TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "The weather.", "parameters": test_grammar.SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("family", test_grammar.TWO_CALLS)
def test_the_format_follows_from_the_chat_template(server: Server, family: str) -> None:
    answer = server.answer(family, test_grammar.TWO_CALLS[family], tools=TWO_TOOLS)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    calls = answer["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "find"), ("function", "now")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [test_grammar.ARGUMENTS, {}]
    assert "The weather." in server.prompt(family) or family == "qwen3_coder"
    assert server.request(family).grammar == ""
    assert all(len(call["id"]) == 9 if family.startswith("mistral") else call["id"].startswith("call_") for call in calls)


def deltas(response: httpx.Response, index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events(response) for choice in event["choices"] if choice["index"] == index]


def test_deltas_have_the_form_of_openai(server: Server) -> None:
    chunks = deltas(server.post("hermes", f"Hm. {CALL}{SECOND}", stream=True))
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *others = [call for call in calls if call["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"}
        assert first["function"].keys() == {"name", "arguments"}
        assert all(other.keys() == {"index", "function"} and other["function"].keys() == {"arguments"} for other in others)
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert all(chunk["delta"] or chunk["finish_reason"] for chunk in chunks)
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_each_of_n_answers_has_its_own_calls(server: Server) -> None:
    server.says("hermes", f"A{CALL}")
    body = server.post("hermes", n=2).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["A", "A"]
    seen = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
    assert len(seen) == 2
    for index in (0, 1):
        chunks = deltas(server.post("hermes", n=2, stream=True), index)
        assert chunks[-1]["finish_reason"] == "tool_calls"


def test_logprobs_have_every_token_that_was_drawn(server: Server) -> None:
    text = f"A{CALL}"
    whole = server.answer("hermes", text, logprobs=True)
    told = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert told == [library().decode([id]) for id in ids(text)] or "".join(told).startswith("A<tool_call>")
    chunks = deltas(server.post("hermes", stream=True, logprobs=True))
    streamed = [entry["token"] for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert streamed == told


def test_a_stop_text_ends_an_answer_inside_a_call(server: Server) -> None:
    answer = server.answer("hermes", CALL, stop=["days"])
    assert ("tool_calls" in answer["message"], answer["finish_reason"]) == (False, "stop")
    both = server.answer("hermes", f"{SECOND}{CALL}", stop=["days"])
    assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["get_time"]
    assert both["finish_reason"] == "stop"
    assert deltas(server.post("hermes", CALL, stop=["days"], stream=True))[-1]["finish_reason"] == "stop"
    whole = server.answer("hermes", CALL, stop=["</tool_call>"])
    assert (len(whole["message"]["tool_calls"]), whole["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("model", ["hermes", "llama_json"])
def test_a_forced_call_that_is_cut_leaves_no_markup(server: Server, model: str) -> None:
    for tokens in (3, 12):
        answer = server.answer(model, test_grammar.TWO_CALLS[model], tools=TWO_TOOLS, max_tokens=tokens, tool_choice="required")
        assert (answer["message"]["content"], answer["finish_reason"]) == ("", "length")
        assert "tool_calls" not in answer["message"]
        chunks = deltas(server.post(model, tools=TWO_TOOLS, max_tokens=tokens, tool_choice="required", stream=True))
        assert not any(chunk["delta"].get("content") for chunk in chunks)


def test_a_response_has_a_cut_call_as_incomplete(server: Server) -> None:
    server.says("hermes", f"{SECOND}{CALL}")
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    body = {"model": "hermes", "input": "What is the weather?", "tools": tools, "stop": ["days"]}
    output = server.client.post("/v1/responses", json=body).json()["output"]
    assert [(item["name"], item["status"]) for item in output] == [("get_time", "completed"), ("get_weather", "incomplete")]


def test_malformed_calls_are_text_and_are_counted(server: Server) -> None:
    counts = [f'yardstick_tool_calls_total{{format="hermes",result="{result}"}}' for result in ("malformed", "called")]
    before = [metric(server.client, count) for count in counts]
    server.answer("hermes", CALL)
    text = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    answer = server.answer("hermes", text)
    assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in answer["message"]
    assert [metric(server.client, count) for count in counts] == [number + 1 for number in before]


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_after_the_first(server: Server, stream: bool) -> None:
    response = server.post("hermes", f"{CALL}{SECOND} and more", parallel_tool_calls=False, stream=stream)
    if stream:
        calls = [call for chunk in deltas(response) for call in chunk["delta"].get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert deltas(response)[-1]["finish_reason"] == "tool_calls"
    else:
        (choice,) = response.json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert response.json()["usage"]["completion_tokens"] < len(ids(f"{CALL}{SECOND} and more"))


def test_with_the_choice_none_the_model_sees_no_tools(server: Server) -> None:
    answer = server.answer("hermes", CALL, tool_choice="none")
    assert answer["message"]["content"] == CALL
    assert "The weather." not in server.prompt("hermes")


@pytest.mark.parametrize(
    ("choice", "strict", "forced"),
    [("required", None, True), ({"type": "function", "function": {"name": "get_weather"}}, None, True), ("auto", True, False)],
)
def test_a_guarantee_is_a_grammar(server: Server, choice: Any, strict: bool | None, forced: bool) -> None:
    strictly = {"type": "function", "function": WEATHER["function"] | {"strict": strict}}
    server.answer("hermes", CALL, tools=[strictly, TIME], tool_choice=choice)
    grammar = server.request("hermes").grammar
    assert '"days":{"type":"integer"}' in grammar
    assert ("OTHER_TEXT" in grammar) != forced
    assert ("get_time" in grammar) == (choice in ("required", "auto"))
    assert "strict" not in server.prompt("hermes")


def tool_of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": {"properties": properties}, **more}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": "plain"}, "tools", "no place for tools"),
        ({"model": "unknown"}, "tools", "not known"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "no tool 'other'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "called 'get_weather'"),
        ({"tools": [TIME] * 129}, "tools", "length <= 128"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "regex"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]}, "tools", "at most 262144"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}, "strict": True}}]},
            "tools[0].function.parameters",
            "type object",
        ),
        ({"model": "pythonic", "tool_choice": "required", "tools": [tool_of({"x-y": {}})]}, "tools", "cannot be named"),
        (
            {"tool_choice": "required", "tools": [tool_of({"x": {"minimum": 2**53 + 1}})]},
            "tools[0].function.parameters",
            "too many digits",
        ),
        (
            {"tools": [TIME, tool_of({"a": {"type": "array", "uniqueItems": True}}, strict=True)]},
            "tools[1].function.parameters.properties.a",
            "uniqueItems",
        ),
        ({"functions": [TIME["function"]]}, "functions", "use `tools`"),
        ({"tool_choice": "sometimes"}, "tool_choice", "enum"),
    ],
)
def test_bad_tools_are_refused(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(server.post(**{"model": "hermes"} | fields), param, words)


def test_the_answer_to_an_unknown_call_is_refused(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    asked = [USER, {"role": "assistant", "tool_calls": [call]}]
    answered = {"role": "tool", "tool_call_id": "call_2", "content": "x"}
    for messages in ([USER, answered], [*asked, answered], [USER, answered | {"tool_call_id": "call_1"}, asked[1]]):
        place = next(at for at, each in enumerate(messages) if each["role"] == "tool")
        id = repr(messages[place]["tool_call_id"])
        check_refused(server.post("hermes", messages=messages), f"messages[{place}].tool_call_id", id)
    nameless = {"role": "assistant", "tool_calls": [{name: value for name, value in call.items() if name != "id"}]}
    for messages in (
        [*asked, answered | {"tool_call_id": "call_1"}],
        [USER, nameless, answered],
        [*asked, answered | {"tool_call_id": None}],
    ):
        assert server.post("hermes", "Yes", messages=messages).status_code == 200


COLOR = {"$ref": "#/$defs/Farbe_ü"}
PAINT = {
    "type": "object",
    "properties": {
        "color": COLOR,
        "back": {"anyOf": [COLOR, {"type": "null"}]},
        "like": {"$ref": "#/properties/back"},
        "size": {"$ref": "#/$defs/Size"},
    },
    "required": ["color"],
    "$defs": {"Farbe_ü": {"enum": ["1", "2"], "type": "string"}, "Size": {"enum": [1, 2], "type": "integer"}},
}


def test_references_of_parameters_are_followed(server: Server) -> None:
    """An enumeration of pydantic is a text, as its values are."""
    family = "qwen3_coder"

    def written(**values: Any) -> str:
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=paint>\n{parameters}</function>\n</tool_call>"

    tool = {"type": "function", "function": {"name": "paint", "parameters": PAINT}}
    values = {"color": "1", "back": "2", "like": "1", "size": 2}
    answer = server.answer(family, written(**values), tools=[tool], tool_choice="required")
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == values
    grammar = server.request(family).grammar
    assert test_grammar.accepts(grammar, written(**values), controls=False)
    for wrong in ({"color": "3"}, {"color": '"1"'}, {"back": "x"}, {"like": "3"}, {"size": 3}):
        assert not test_grammar.accepts(grammar, written(**values | wrong), controls=False)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_options_of_a_schema_take_effect(server: Server, family: str) -> None:
    one_of = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}
    parameters = {"type": "object", "properties": {"days": one_of}, "required": ["days"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    check_refused(server.post(family, tools=[tool]), "tools[0].function.parameters")
    parameters["x-guidance"] = {"coerce_one_of": True}
    server.answer(family, "Yes", tools=[tool], tool_choice="required")
    written = {"hermes": '<tool_call>\n{"name": "f", "arguments": {"days": 7}}\n</tool_call>'}
    tagged = "<tool_call>\n<function=f>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>"
    assert test_grammar.accepts(server.request(family).grammar, written.get(family, tagged), controls=False)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}}])
@pytest.mark.parametrize("model", ["hermes", "mistral_named"])
def test_a_forced_function_without_parameters_gets_none(server: Server, model: str, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "now"} | ({} if parameters is None else {"parameters": parameters})}
    written = {
        "hermes": '<tool_call>\n{{"name": "now", "arguments": {}}}\n</tool_call>',
        "mistral_named": "[TOOL_CALLS]now[ARGS]{}",
    }
    answer = server.answer(model, written[model].format("{}"), tools=[tool], tool_choice="required")
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    grammar = server.request(model).grammar
    assert test_grammar.accepts(grammar, written[model].format("{}"), controls=False)
    assert not test_grammar.accepts(grammar, written[model].format('{"a": 1}'), controls=False)


@pytest.mark.parametrize("depth", [900, 20_000])
def test_deep_nesting_is_no_fault(server: Server, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    earlier = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": f'{{"x": {deep}}}'}}]}
    response = server.post("hermes", "Yes", tool_choice="required", messages=[USER, earlier, USER])
    assert response.status_code in (200, 400), response.text


def test_a_template_that_takes_arguments_as_text_gets_text(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": "é"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    for model in ("hermes", "texts"):
        server.answer(model, "Yes", messages=messages)
        assert '"arguments": {"a": "é"}}' in server.prompt(model)


def test_control_tokens_in_tools_and_arguments_are_text(server: Server) -> None:
    spoken = {"type": "function", "function": {"name": "f", "description": f"{EOS} now"}}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": f"{EOS}now"}).replace("<", "\\u003c")},
    }
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    server.answer("hermes", "Yes", messages=messages, tools=[spoken])
    prompt = server.request("hermes").prompt
    assert server.prompt("hermes").count(EOS) == prompt.count(server.engines["hermes"].eos) + 2


def test_tokenize_shows_the_tools_that_chat_shows(server: Server) -> None:
    server.answer("hermes", "Yes")
    body = {"model": "hermes", "messages": [USER], "tools": [WEATHER, TIME]}
    assert server.client.post("/tokenize", json=body).json()["tokens"] == server.request("hermes").prompt
    assert server.client.post("/tokenize", json=body | {"model": "plain"}).status_code == 400


# Thinking.

THOUGHT = "<think>\nThe user asks.\n</think>\n\nIt is sunny."


def test_thinking_is_separated(server: Server) -> None:
    body = server.post("thinking", THOUGHT, tools=None).json()
    message, usage = body["choices"][0]["message"], body["usage"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("The user asks.",) * 2 + ("It is sunny.",)
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert body["choices"][0]["finish_reason"] == "stop"
    *streamed, last = events(server.post("thinking", tools=None, stream=True, stream_options={"include_usage": True}))
    told = [event["choices"][0]["delta"] for event in streamed]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in told) == message[name]
    assert last["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_a_section_that_the_prompt_opens(server: Server) -> None:
    message = server.answer("always", "The user asks.\n</think>\n\nIt is sunny.", tools=None)["message"]
    assert (message["reasoning_content"], message["content"]) == ("The user asks.", "It is sunny.")
    cut = server.answer("always", "The user asks.", tools=None)
    assert (cut["message"]["reasoning_content"], cut["message"]["content"]) == ("The user asks.", "")


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=["own", "Cline with GLM"])
def test_reasoning_can_be_left_out(server: Server, fields: dict[str, Any]) -> None:
    body = server.post("thinking", THOUGHT, tools=None, **fields).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning": {"enabled": False, "effort": "high"}},
    ],
)
def test_thinking_can_be_switched_off(server: Server, fields: dict[str, Any]) -> None:
    body = server.post("thinking", "<think> is a tag.", tools=None, **fields).json()
    assert server.prompt("thinking").endswith("<think>\n\n</think>\n\n")
    assert body["choices"][0]["message"]["content"] == "<think> is a tag."
    assert "completion_tokens_details" not in body["usage"]


def test_effort_reaches_a_template_that_reads_it(server: Server) -> None:
    server.answer("effort", "Yes", tools=None, reasoning_effort="high")
    assert server.prompt("effort").startswith("Effort: high")
    server.answer("thinking", "Yes", tools=None, reasoning_effort="high")
    assert not server.prompt("thinking").endswith("</think>\n\n")


def test_reasoning_of_claude_code_router(server: Server) -> None:
    reasoning = {"effort": "medium", "enabled": True}
    server.answer("effort", "Yes", tools=None, reasoning=reasoning)
    assert server.prompt("effort").startswith("Effort: medium")
    for given in (reasoning, {"enabled": True}, {"effort": "low"}, {}):
        server.answer("thinking", "Yes", tools=None, reasoning=given)
        assert not server.prompt("thinking").endswith("</think>\n\n")
    check_refused(server.post("plain", tools=None, reasoning=reasoning), "reasoning.effort", "does not read it")
    check_refused(server.post("plain", tools=None, reasoning={"enabled": True}), "reasoning.enabled", "does not read it")
    check_refused(server.post("thinking", tools=None, reasoning=reasoning, reasoning_effort="low"), "reasoning", "does not go")
    check_refused(server.post("thinking", tools=None, reasoning={"max_tokens": 5}), "reasoning.max_tokens", "no field")


@pytest.mark.parametrize(
    ("model", "fields"),
    [("plain", {"reasoning_effort": "high"}), ("plain", {"enable_thinking": True}), ("always", {"enable_thinking": False})],
)
def test_a_field_that_the_template_does_not_read_is_refused(server: Server, model: str, fields: dict[str, Any]) -> None:
    check_refused(server.post(model, tools=None, **fields), *fields, "does not read it")


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"enable_thinking": False}, {"include_reasoning": False}])
def test_what_a_model_without_thinking_does_anyway_is_accepted(server: Server, fields: dict[str, Any]) -> None:
    assert server.answer("plain", "Yes", tools=None, **fields)["message"]["content"] == "Yes"


def test_earlier_thinking_reaches_the_template(server: Server) -> None:
    for name in ("reasoning_content", "reasoning"):
        server.answer("thinking", "Yes", messages=[USER, {"role": "assistant", "content": "A", name: "Hm."}, USER])
        assert "<think>\nHm.\n</think>\n\nA<|im_end|>" in server.prompt("thinking")


def test_thinking_comes_before_a_forced_call(server: Server) -> None:
    server.answer("thinking", CALL, tool_choice="required")
    assert "thinking" in server.request("thinking").grammar
    server.answer("thinking", CALL, tool_choice="required", enable_thinking=False)
    assert "thinking" not in server.request("thinking").grammar


def test_a_response_format_applies_behind_thinking_and_beside_calls(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for tools, thinks in ((None, True), ([WEATHER], True), (None, False)):
        server.answer("thinking", '{"a": 1}', tools=tools, response_format=format, enable_thinking=thinks)
        grammar = server.request("thinking").grammar
        assert '"a"' in grammar
        assert ("thinking" in grammar) == thinks
        assert ("get_weather" in grammar) == bool(tools)
    server.answer("hermes", CALL, response_format=format, tool_choice="required")
    assert '"a"' not in server.request("hermes").grammar


def test_a_plain_answer_has_no_parser(server: Server) -> None:
    answer = server.answer("plain", "<think>a</think><tool_call>b", tools=None)
    assert answer["message"] == {"role": "assistant", "content": "<think>a</think><tool_call>b", "refusal": None}


def test_settings_choose_the_formats(start: Start) -> None:
    engine = FakeEngine(model="m", template=templates.TOOLS_IN_NO_FORMAT, says=ids(f"<think>a</think>{CALL}"))
    client = start(engine, tool_parsers=("m=hermes",), reasoning_parsers=("m=think",))
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": [USER], "tools": [WEATHER]})
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "a"
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_section_needs_a_model_whose_tags_are_tokens(server: Server) -> None:
    section = "length_guidance.applies_to"
    for model, words in (("thinking", "no tokens of their own"), ("plain", "does not think")):
        check_refused(server.post(model, tools=None, thinking_budget=9), section, words)
        check_refused(
            server.client.post("/v1/responses", json={"model": model, "input": "a", "thinking_budget": 9}), section, words
        )
    check_refused(server.post("thinking", tools=None, thinking_token_budget=9), "thinking_token_budget")
    check_refused(server.post("plain", tools=None, thinking_budget=9, length_guidance={"scale": 1}), "thinking_budget")


def test_guidance_of_the_answer_of_a_model_that_does_not_think_is_guidance_of_all(server: Server) -> None:
    server.answer("plain", "Yes", tools=None, length_guidance={"scale": -3, "applies_to": "answer"})
    assert server.request("plain").length_guidance == wire.LengthGuidance(scale=-3)
    body = {"model": "plain", "prompt": "Yes", "length_guidance": {"scale": -3, "applies_to": "answer"}}
    response = server.client.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == "length_guidance.applies_to"
