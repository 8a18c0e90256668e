"""Structured output through the OpenAI SDK, a gateway process and an engine process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program

MESSAGES: Any = [{"role": "user", "content": "the red shoes"}]
BIAS = {"4": 5.0, "63": 5.0, "95": 5.0}
"""For ``"``, ``]`` and ``}``, so that a model with random weights ends strings, arrays and objects."""


class Shoe(pydantic.BaseModel):
    """The fields that the model fills in."""

    name: str = pydantic.Field(max_length=12)
    size: int = pydantic.Field(ge=30, le=50)
    colour: Literal["red", "größer", "<|im_end|>"]
    tags: list[Literal["a", "b c"]] = pydantic.Field(max_length=2)
    box: Shoe | None


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    model = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")
    pod = Pod(model, "--name", "tiny", "--threads", "1")
    pod.wait_ready()
    gateway = Program("gateway", "--engine", pod.url)
    yield gateway.wait_ready()
    metrics = pod.client.get("/metrics").text
    assert "yardstick_engine_compiled_grammars_total 0.0" not in metrics
    assert float(re.search(r"^yardstick_engine_grammar_masks_total (\S+)", metrics, re.M)[1]) > 0
    for program in (gateway, pod):
        program.close()


@pytest.fixture(scope="module")
def client(gateway: Program) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_gives_pydantic_objects(client: openai.OpenAI) -> None:
    def shoes(seed: int) -> list[Shoe]:
        completion = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Shoe, n=2, seed=seed, logit_bias=BIAS, max_tokens=1500
        )
        assert [choice.finish_reason for choice in completion.choices] == ["stop"] * 2
        return [choice.message.parsed for choice in completion.choices if choice.message.parsed is not None]

    first = shoes(1)
    assert len(first) == 2
    assert first == shoes(1)
    assert first != shoes(2)


def test_streamed_as_whole(client: openai.OpenAI) -> None:
    """With log-probabilities, several choices and a stop string; a stream is the whole answer in pieces."""
    fields: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "max_tokens": 300,
        "logit_bias": BIAS,
    }
    extra = {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}}}
    whole = client.chat.completions.create(**fields, extra_body=extra)
    texts, tokens = {0: "", 1: ""}, {0: "", 1: ""}
    for chunk in client.chat.completions.create(**fields, extra_body=extra, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += "".join(each.token for each in (choice.logprobs.content if choice.logprobs else []))
    for choice in whole.choices:
        assert choice.message.content == texts[choice.index] == tokens[choice.index]
        assert len(json.loads(texts[choice.index])) == 4
    stopped = client.chat.completions.create(**fields, extra_body=extra, stop=",")
    assert [choice.message.content for choice in stopped.choices] == [texts[index].split(",")[0] for index in (0, 1)]


def test_json_objects_and_choices_on_completions(client: openai.OpenAI) -> None:
    extra = {"response_format": {"type": "json_object"}}
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], seed=3, max_tokens=400, logit_bias=BIAS, extra_body=extra, logprobs=1
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert all(isinstance(json.loads(choice.text), dict) for choice in answer.choices)
    chosen = client.completions.create(model="tiny", prompt="a", extra_body={"guided_choice": ["Yes", "No"]}, n=8)
    assert {choice.text for choice in chosen.choices} <= {"Yes", "No"}


def test_words_that_must_not_occur(client: openai.OpenAI) -> None:
    free: Any = {"model": "tiny", "prompt": "the", "seed": 2, "max_tokens": 60, "extra_body": {"allowed_token_ids": [67, 68]}}
    before = client.completions.create(**free).choices[0].text
    assert set(before) == {"a", "b"}
    free["extra_body"] |= {"bad_words": ["ab"]}
    assert "ab" in before
    assert "ab" not in client.completions.create(**free).choices[0].text


def test_an_invalid_schema_is_a_400_that_names_the_place(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)
    assert raised.value.param == "response_format.json_schema.schema.properties.a"
