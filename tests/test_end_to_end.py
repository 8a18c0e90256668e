"""Gateway and engine as the processes they are, driven as clients do, compared with Hugging Face transformers on the same text."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_models.forward import causal_hidden
from examples.demo_models.lenvm import GAMMA
from examples.demo_models.text import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, gateway_before
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.lenvm import load_lenvm

TOUR = Path(__file__).parent / "gateway" / "api" / "sdk_tour.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[Program]:
    with Pod(model, "--name", "tiny") as pod, gateway_before(pod) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def reference(model: Path):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model)


@torch.inference_mode()
def probabilities(reference, text: str) -> torch.Tensor:
    decoder, tokenizer = reference
    return decoder(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].softmax(-1)


def post(gateway: Program, path: str, **body):
    response = gateway.client.post(path, json={"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [False, True])
def test_scores_are_those_of_each_concatenated_prompt(gateway: Program, reference, item_first: bool, apply_softmax: bool):
    query, items = "Is the red", ["shoes blue?", "", " Yes the", "Yés 👟", "d"]  # the last joins a token with the query's end
    answer = post(
        gateway, "/v1/score", query=query, items=items, labels=["Yes", " No"], item_first=item_first, apply_softmax=apply_softmax
    )
    labels = [reference[1]("Yes").input_ids[0], reference[1](" No").input_ids[0]]
    for item, scores in zip(items, answer["scores"], strict=True):
        expected = probabilities(reference, item + query if item_first else query + item)[labels]
        expected = expected / expected.sum() if apply_softmax else expected
        assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    tokens = sum(len(reference[1](query + item).input_ids) for item in items)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens


@torch.inference_mode()
def test_chat_is_what_transformers_writes(gateway: Program, reference):
    decoder, tokenizer = reference
    messages = [{"role": "user", "content": "the red shoes"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = decoder.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    answer = post(gateway, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=40)
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.fixture(scope="module")
def demo() -> Iterator[Program]:
    lenvm = ("--lenvm-model", str(MODELS / "lenvm"))
    with Pod(MODELS / "base", "--name", "demo", *lenvm, "--max-total-tokens", "16384") as pod, gateway_before(pod) as gateway:
        yield gateway


def test_the_openai_sdk_on_a_real_engine(demo: Program):
    """Every endpoint, with and without length guidance. tests/gateway/api/test_sdk.py has version 2 of the SDK."""
    command = [sys.executable, "-W", "ignore", str(TOUR), f"{demo.url}/v1", "demo"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env={"PATH": ""})
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["completions"]["texts"] == told["completions"]["streamed"]
    assert told["chat"]["text"] == told["chat"]["streamed"] == told["async"]["helped"]
    assert told["chat"]["logprobs"] == pytest.approx(told["chat"]["streamed_logprobs"], abs=1e-5)
    assert told["async"]["text"] == told["async"]["streamed"] == told["completions"]["texts"][0]
    assert {error["status"] for error in told["errors"].values()} == {400, 404}
    responses = told["responses"]
    assert responses["text"] == responses["streamed"] == responses["last"] == responses["final"] == responses["kept"]
    assert (responses["numbers"], responses["gone"]) == (True, "response_not_found")
    length = told["length"]
    assert len(length["values"]) == len(length["streamed_values"])
    for whole, streamed in zip(length["values"], length["streamed_values"], strict=True):
        assert whole == pytest.approx(streamed, abs=1e-5)
    assert len(length["values"]) == len(length["written_values"]) == 8
    assert 0 < length["aimed_tokens"] <= 56


@torch.inference_mode()
def test_values_are_those_of_a_plain_forward(demo: Program):
    model, tokenizer = load_lenvm(MODELS / "lenvm"), load_tokenizer(MODELS / "base")
    prompt, partial = "Describe: red shoes\n", ["", "A note in one line. First,", "A review in eleven parts. Part one:"]
    body = {"model": "demo", "prompt": prompt, "partial": partial}
    for _ in range(2):  # the second time, much is cached
        answer = demo.client.post("/v1/length", json=body).json()
        for text, entry in zip(partial, answer["data"], strict=True):
            ids = torch.tensor([tokenizer.encode(prompt + text).ids])
            z = model.value(causal_hidden(model, ids)[0, -1:])[0].double()
            assert entry["value"] == pytest.approx(z.sigmoid().item(), abs=1e-5)
            tokens = torch.nn.functional.logsigmoid(-z).item() / math.log(GAMMA)
            assert entry["remaining_tokens"] == pytest.approx(tokens, rel=1e-4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    note, review = (entry["remaining_tokens"] for entry in answer["data"][1:])
    assert note < review


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
def client(gateway: Program) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_gives_pydantic_objects(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Shoe, n=2, seed=1, logit_bias=BIAS, max_tokens=1500
    )
    assert [choice.finish_reason for choice in completion.choices] == ["stop"] * 2
    assert all(isinstance(choice.message.parsed, Shoe) for choice in completion.choices)
