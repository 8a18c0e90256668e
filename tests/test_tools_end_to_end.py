"""Tool calls of a model with random weights, through a real gateway and a real engine: grammars make it call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from tests import templates
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, gateway_before

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
USER: Any = {"role": "user", "content": "What is the weather?"}
ADDED = {"hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"], "mistral_named": ["[TOOL_CALLS]", "[ARGS]"]}
"""Tokens of the models' own: text tags of Qwen, and control tokens of Mistral."""


def with_template(directory: Path, template: str, added: list[str], *, special: bool) -> Path:
    """Give the model another chat template and more tokens. Returns ``directory``."""
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def serve(directory: Path, name: str, template: str, *, special: bool) -> Iterator[openai.OpenAI]:
    """Serve a model with random weights in a gateway and an engine, and yield a client."""
    model = with_template(make_checkpoint(directory, "qwen3"), template, ADDED[name], special=special)
    # One thread, because threads of the engine that wait for others slow a busy machine down.
    with (
        Pod(model, "--name", name, "--threads", "1") as pod,
        gateway_before(pod) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    yield from serve(tmp_path_factory.mktemp("hermes"), "hermes", templates.THINKING, special=False)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    yield from serve(tmp_path_factory.mktemp("mistral"), "mistral_named", templates.MISTRAL_NAMED, special=True)


def check(calls: Any, names: list[str]) -> None:
    for call in calls:
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMA if call.function.name == "get_weather" else {"type": "object", "maxProperties": 0})


FIELDS: dict[str, Any] = {"max_tokens": 250, "temperature": 1.5, "reasoning_effort": "none", "seed": 1}


@pytest.mark.parametrize(("served", "parallel"), [("client", False), ("client", True), ("mistral", True)])
def test_required_calls_are_valid(served: str, parallel: bool, request: pytest.FixtureRequest) -> None:
    client: openai.OpenAI = request.getfixturevalue(served)
    model = "hermes" if served == "client" else "mistral_named"
    answer = client.chat.completions.create(
        model=model, messages=[USER], tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=parallel, n=3, **FIELDS
    )
    complete = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert complete
    assert parallel or len(complete) == 3
    for choice in complete:
        assert choice.message.content is None
        assert len(choice.message.tool_calls) == 1 or parallel
        check(choice.message.tool_calls, ["get_weather", "get_time"])


def test_a_tool_loop_with_a_named_tool(client: openai.OpenAI) -> None:
    messages: list[Any] = [USER]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model="hermes", messages=messages, tools=[STRICT, TIME], tool_choice=choice, logprobs=True, **FIELDS
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.name for event in done] == ["get_weather"]
    check(message.tool_calls, ["get_weather"])
    assert done[0].parsed_arguments == json.loads(message.tool_calls[0].function.arguments)
    messages += [message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    last = client.chat.completions.create(model="hermes", messages=messages, tools=[STRICT], tool_choice="none", max_tokens=3)
    assert last.choices[0].message.tool_calls is None


def test_a_strict_tool_that_is_called_freely_gets_valid_arguments(client: openai.OpenAI) -> None:
    opening = client.post("/tokenize", body={"model": "hermes", "prompt": "<tool_call>"}, cast_to=dict)["tokens"]
    assert len(opening) == 1
    answer = client.chat.completions.create(
        model="hermes", messages=[USER], tools=[STRICT], logit_bias={str(opening[0]): 100}, parallel_tool_calls=False, **FIELDS
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    check(choice.message.tool_calls, ["get_weather"])


def test_responses_call_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function"} | WEATHER["function"] | {"strict": True}
    asked: dict[str, Any] = {
        "model": "hermes",
        "input": "What is the weather?",
        "tools": [tool],
        "tool_choice": "required",
        "reasoning": {"effort": "none"},
        "max_output_tokens": 250,
        "extra_body": {"seed": 1},
    }
    told = client.responses.create(**asked)
    calls = [item for item in told.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == f"response.{told.status}"
    assert [item.arguments for item in last.response.output if item.type == "function_call"] == [call.arguments for call in calls]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"} for call in calls]
    replayed: Any = [{"role": "user", "content": "What is the weather?"}, *told.output, *results]
    following = client.responses.create(**asked | {"input": replayed, "tool_choice": "none"})
    assert all(item.type != "function_call" for item in following.output)


LARK = 'start: line ("\\n" line)?\nline: WORD "(" TEXT ")"\nWORD: "add" | "say"\nTEXT: "\\"" /[a-z\\\\]{1,3}/ "\\""'


def test_a_custom_tool_with_a_grammar(client: openai.OpenAI) -> None:
    format = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}}
    run: Any = {"type": "custom", "custom": {"name": "run", "format": format}}
    named = {"type": "custom", "custom": {"name": "run"}}
    only: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    answer = client.chat.completions.create(
        model="hermes", messages=[USER], tools=[TIME, run], tool_choice=only, parallel_tool_calls=False, n=4, **FIELDS
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert re.fullmatch(r'(add|say)\("[a-z\\]{1,3}"\)(\n(add|say)\("[a-z\\]{1,3}"\))?', call.custom.input)
    flat: Any = {"type": "custom", "name": "run", "format": {"type": "grammar"} | format["grammar"]}  # type: ignore[dict-item]
    told = client.responses.create(
        model="hermes", input="Run.", tools=[flat], tool_choice={"type": "custom", "name": "run"}, reasoning={"effort": "none"}
    )
    assert re.match(r'(add|say)\("', told.output[0].input)
