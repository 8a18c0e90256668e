"""Function calls, reasoning and formats of ``/v1/responses``, with an engine that says what a test chooses."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests import templates
from tests.fakes import FakeEngine, ids
from tests.gateway.answers import rendered
from tests.gateway.api.test_responses_api import create, stable, stream

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"type": "function", "name": "get_time"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LONG = {"max_output_tokens": 400, "tools": [WEATHER, TIME]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ENGINE = {"template": templates.THINKING, "capabilities": (*FakeEngine.capabilities, "grammar")}


def test_an_answer_of_thinking_text_and_calls(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{SECOND}")
    told = create(client, **LONG)
    thinking, message, first, second = told["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Where?"}]
    assert thinking["summary"] == []
    assert message["content"][0]["text"].strip() == "I look."
    assert (first["type"], first["name"], json.loads(first["arguments"])) == ("function_call", "get_weather", {"city": "Zürich 😀"})
    assert (second["name"], json.loads(second["arguments"])) == ("get_time", {})
    assert first["call_id"] != second["call_id"]
    assert {item["status"] for item in told["output"]} == {"completed"}
    assert told["status"] == "completed"
    assert 0 < told["usage"]["output_tokens_details"]["reasoning_tokens"] < told["usage"]["output_tokens"]
    assert [tool["name"] for tool in told["tools"]] == ["get_weather", "get_time"]
    assert "get_weather" in rendered(engine)


def test_the_stream_of_such_an_answer(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{SECOND}")
    events = stream(client, **LONG)
    whole = events[-1]["response"]
    expected = stable(create(client, **LONG))
    for item, other in zip(whole["output"], expected["output"], strict=True):
        assert item | {"id": None, "call_id": None} == other | {"call_id": None}
    kinds = [event["type"].removeprefix("response.") for event in events]
    shape = [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]]
    item = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert shape == [
        "created",
        "in_progress",
        *[*item, "reasoning_text.delta", "reasoning_text.done", *ended],
        *[*item, "output_text.delta", "output_text.done", *ended],
        *call,
        *call,
        "completed",
    ]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == whole["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    for place in (2, 3):
        deltas = [
            event["delta"]
            for event in events
            if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == place
        ]
        assert "".join(deltas) == whole["output"][place]["arguments"]


WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        (f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{SECOND}", ["I look."]),
        ("<think>\nWhere?\n</think>\n\nIt is 😀 <tool_cal", ["It is 😀 <tool_cal"]),
        (f"One {CALL} two {SECOND}", ["One", " two"]),
        (CALL, []),
    ],
)
def test_log_probabilities_are_those_of_the_text(client: httpx.Client, engine: FakeEngine, said: str, texts: list[str]) -> None:
    engine.says = ids(said)
    told = create(client, **LONG, **WITH_LOGPROBS)
    parts = [item["content"][0] for item in told["output"] if item["type"] == "message"]
    assert [part["text"] for part in parts] == texts
    for part in parts:
        spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
        assert part["text"] in spelled
        first, last = (bytes(part["logprobs"][place]["bytes"]).decode(errors="replace") for place in (0, -1))
        assert len(spelled) < len(part["text"]) + len(first) + len(last)
    events = stream(client, **LONG, **WITH_LOGPROBS)
    assert [item["content"] for item in events[-1]["response"]["output"] if item["type"] == "message"] == [[part] for part in parts]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == [entry for part in parts for entry in part["logprobs"]]


@pytest.mark.parametrize("summary", ["auto", "detailed"])
def test_a_summary_of_reasoning_is_its_text(client: httpx.Client, engine: FakeEngine, summary: str) -> None:
    engine.says = ids("<think>\nWhere?\n</think>\n\nHere.")
    thinking, message = create(client, reasoning={"summary": summary}, max_output_tokens=99)["output"]
    assert thinking["summary"] == [{"type": "summary_text", "text": "Where?"}]
    events = stream(client, reasoning={"summary": summary}, max_output_tokens=99)
    kinds = [event["type"] for event in events if "summary" in event["type"]]
    names = ("part.added", "text.delta", "text.done", "part.done")
    assert kinds == [f"response.reasoning_summary_{name}" for name in names]
    assert events[-1]["response"]["output"][0]["summary"] == thinking["summary"]
    assert create(client, 400, reasoning={"summary": "concise"})["error"]["param"] == "reasoning.summary"
    create(client, input=[{"role": "user", "content": "a"}, thinking, message, {"role": "user", "content": "b"}])
    assert "Where?" in rendered(engine)


def test_the_output_of_an_unknown_call_is_refused(client: httpx.Client, engine: FakeEngine) -> None:
    user, call = {"role": "user", "content": "a"}, {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    for kind in ("function_call_output", "custom_tool_call_output"):
        for given in (
            [user],
            [user, call],
            [user, {"type": kind, "call_id": "call_2", "output": "x"}, call | {"call_id": "call_2"}],
        ):
            place = 1 if len(given) == 3 else len(given)
            items = given if len(given) == 3 else [*given, {"type": kind, "call_id": "call_2", "output": "x"}]
            error = create(client, 400, input=items)["error"]
            assert (error["param"], "'call_2'" in error["message"]) == (f"input[{place}].call_id", True)
    engine.says = ids(CALL)
    first = create(client, **LONG, store=True)
    result = {"type": "function_call_output", "call_id": "call_2", "output": "22 degrees"}
    error = create(client, 400, input=[result], previous_response_id=first["id"])["error"]
    assert error["param"] == "input[0].call_id"


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_other_media_are_refused_with_the_remedy(client: httpx.Client, kind: str) -> None:
    part = {"type": kind, "image_url": "data:,x"}
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    for items, path in (
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}], "input[0].content[1]"),
        ([call, {"type": "function_call_output", "call_id": "call_1", "output": [part]}], "input[1].output[0]"),
    ):
        error = create(client, 400, input=items)["error"]
        assert error["param"] == f"{path}.type"
        assert "Send images to /v1/chat/completions" in error["message"]


def test_a_tool_loop_by_items_and_by_the_store(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(f"<think>\nWhere?\n</think>\n\n{CALL}")
    first = create(client, **LONG, store=True)
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 degrees"}
    engine.says = ids("It is warm.")
    create(client, input=[{"role": "user", "content": "The fox"}, *first["output"], result], tools=[WEATHER, TIME])
    by_items = rendered(engine)
    create(client, input=[result], previous_response_id=first["id"], tools=[WEATHER, TIME])
    assert rendered(engine) == by_items
    assert re.search(r"<think>\nWhere\?\n</think>\s+<tool_call>", by_items)
    assert '"city": "Zürich 😀"' in by_items
    assert "<|im_start|>tool\n22 degrees<|im_end|>" in by_items
    listed = client.get(f"/v1/responses/{first['id']}").json()
    assert listed == first


def test_the_choice_of_tools(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids(CALL)
    told = create(client, **LONG, tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False)
    assert engine.generates[-1].grammar
    assert told["tool_choice"] == {"type": "function", "name": "get_weather"}
    assert told["parallel_tool_calls"] is False
    create(client, **LONG, tool_choice="none")
    assert "get_weather" not in rendered(engine)
    refused = create(client, 400, **LONG, tool_choice={"type": "function", "name": "other"})
    assert refused["error"]["param"].startswith("tool_choice")


CODEX = {"stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False}
"""Fields of Codex CLI 0.171, besides ``include``, ``prompt_cache_key`` and ``client_metadata``."""


def test_namespaces_of_codex(client: httpx.Client, engine: FakeEngine) -> None:
    """Codex sends the tools of MCP servers in namespaces, and finds the called tool by both names."""
    space = {
        "type": "namespace",
        "name": "mcp__weather",
        "description": "Weather.",
        "tools": [WEATHER, {"type": "custom", "name": "say"}],
    }
    tools = [TIME, space]
    engine.says = ids(CALL.replace("get_weather", "mcp__weather__get_weather"))
    body = {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}], **CODEX}
    events = stream(client, **body, tools=tools, max_output_tokens=400)
    (call,) = events[-1]["response"]["output"]
    assert (call["namespace"], call["name"]) == ("mcp__weather", "get_weather")
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == [call]
    assert next(event["name"] for event in events if event["type"].endswith("arguments.done")) == "get_weather"
    assert events[-1]["response"]["tools"][1]["name"] == "mcp__weather"
    assert "mcp__weather__say" in rendered(engine)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 degrees"}
    engine.says = ids("<tool_call>\n" + json.dumps({"name": "mcp__weather__say", "arguments": {"input": "Hm."}}) + "\n</tool_call>")
    told = create(client, input=[*body["input"], call, result], tools=tools, max_output_tokens=400)
    assert '"name": "mcp__weather__get_weather"' in rendered(engine)
    assert [(item["type"], item["namespace"], item["name"], item["input"]) for item in told["output"]] == [
        ("custom_tool_call", "mcp__weather", "say", "Hm.")
    ]
    engine.says = ids(SECOND)
    assert "namespace" not in create(client, **body | {"stream": False}, tools=tools, max_output_tokens=400)["output"][0]
    wrong = WEATHER | {"strict": True, "parameters": {"type": "array"}}
    for given, param in (
        ([TIME, space | {"tools": [TIME, wrong]}, TIME | {"name": "last"}], "tools[1].tools[1].parameters"),
        ([space, TIME | {"name": "mcp__weather__get_weather"}], "tools[1].name"),
        ([space | {"tools": [space]}], "tools[0].tools[0].type"),
        ([space | {"name": "a b"}], "tools[0].name"),
        ([space | {"tools": [TIME | {"name": f"t{number}"} for number in range(127)]}, TIME, WEATHER], "tools"),
        ([{"type": "web_search", "external_web_access": False}], "tools[0].type"),
    ):
        assert create(client, 400, tools=given)["error"]["param"] == param


def test_thinking_can_be_switched_off(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red")
    create(client, reasoning={"effort": "none", "summary": "auto"})
    assert rendered(engine).endswith("<think>\n\n</think>\n\n")


def test_the_format_of_the_text(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids('{"a": 1}')
    format = {"type": "json_schema", "name": "out", "schema": SCHEMA, "strict": True}
    told = create(client, text={"format": format})
    assert "json" in engine.generates[-1].grammar
    assert told["text"]["format"] == format
    create(client, text={"format": {"type": "text"}})
    assert not engine.generates[-1].grammar
    create(client, text={"format": {"type": "json_object"}})
    assert engine.generates[-1].grammar
    for wrong in ({"type": "json_schema", "name": "out"}, format | {"schema": {"type": "objekt"}}):
        refused = create(client, 400, text={"format": wrong})["error"]
        assert refused["param"].startswith("text.format.schema"), refused
    both = create(client, 400, text={"format": {"type": "json_object"}}, response_format={"type": "json_object"})
    assert both["error"]["param"] == "response_format"
