"""Tool calls of a model with random weights, through a real gateway and a real engine: grammars make it call tools. What grammars
accept, tests/gateway/output/test_grammar.py tries."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
SERVED = {
    "hermes": (templates.THINKING, ["<tool_call>", "</tool_call>", "<think>", "</think>"], False),
    "mistral_named": (templates.MISTRAL_NAMED, ["[TOOL_CALLS]", "[ARGS]"], True),
}
"""Template and tokens of the models' own: text tags of Qwen, and control tokens of Mistral."""


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a model with random weights, of one of the names in ``SERVED``."""
    template, added, special = SERVED[request.param]
    model = make_checkpoint(tmp_path_factory.mktemp(request.param), "qwen3")
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    tokenizer.save(str(model / "tokenizer.json"))
    # One thread, because threads of the engine that wait for others slow a busy machine down.
    with (
        Pod(model, "--name", request.param, "--threads", "1") as pod,
        gateway_before(pod) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def check(calls: Any, names: list[str]) -> None:
    for call in calls:
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMA if call.function.name == "get_weather" else {"type": "object", "maxProperties": 0})


FIELDS: dict[str, Any] = {"max_tokens": 250, "temperature": 1.5, "reasoning_effort": "none", "seed": 1}


@pytest.mark.parametrize(("client", "parallel"), [("hermes", False), ("mistral_named", True)], indirect=["client"])
def test_required_calls_are_valid(client: openai.OpenAI, parallel: bool) -> None:
    (model,) = client.models.list()
    answer = client.chat.completions.create(
        model=model.id, messages=[USER], tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=parallel, n=3, **FIELDS
    )
    complete = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert complete
    assert parallel or len(complete) == 3
    for choice in complete:
        assert choice.message.content is None
        assert len(choice.message.tool_calls) == 1 or parallel
        check(choice.message.tool_calls, ["get_weather", "get_time"])


@pytest.mark.parametrize("client", ["hermes"], indirect=True)
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
