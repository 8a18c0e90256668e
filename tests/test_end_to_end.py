"""Gateway and engine as the processes they are, driven as clients do, compared with Hugging Face transformers on the same text."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_models.forward import causal_hidden
from examples.demo_models.lenvm import GAMMA
from examples.demo_models.text import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, gateway_before, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.lenvm import load_lenvm

TOUR = Path(__file__).parent / "gateway" / "api" / "sdk_tour.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def pod(model: Path) -> Iterator[Pod]:
    with Pod(model, "--name", "tiny") as pod:
        yield pod


@pytest.fixture(scope="module")
def gateway(pod: Pod) -> Iterator[Program]:
    with gateway_before(pod) as gateway:
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
def test_likelihoods_of_items(gateway: Program, reference):
    decoder, tokenizer = reference
    query = "Is the red"
    items = [" shoes blue?", " Yes", " Yes the red shoes", " d", " Yés 👟\nand more", "\n"]
    fields = {"query": query, "items": items, "readout": "likelihood", "return_token_logprobs": True}
    answer = post(gateway, "/v1/score", **fields)
    given = len(tokenizer(query).input_ids)
    for item, found in zip(items, answer["data"], strict=True):
        ids = tokenizer(query + item).input_ids
        rows = decoder(torch.tensor([ids])).logits[0].log_softmax(-1)[given - 1 : -1]
        own = torch.tensor(ids[given:])
        expected = rows.gather(1, own.unsqueeze(1)).squeeze(1)
        assert found["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert found["logprob"] == pytest.approx(float(expected.sum()), abs=1e-5 * len(own))
        assert found["mean_logprob"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert found["tokens"] == len(own)
        assert found["is_greedy"] == bool((rows.argmax(1) == own).all())
    greedy = decoder.generate(torch.tensor([tokenizer(query).input_ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    fields = {"query": greedy[:given].tolist(), "items": [greedy[given:].tolist(), [5, 6]], "readout": "likelihood"}
    answer = post(gateway, "/v1/score", **fields)
    assert [item["is_greedy"] for item in answer["data"]] == [True, False]
    again = gateway.client.post("/v1/score", json={"model": "tiny"} | fields)
    assert again.headers["x-yardstick-cache"] == "2/2"
    assert again.json()["data"] == answer["data"]


def test_an_urgent_request_overtakes_a_running_one_of_its_key(pod: Pod, gateway: Program):
    """The large request is one message, whose steps take seconds; the urgent one is computed in its next step."""

    def ask(items: list[list[int]], priority: int) -> object:
        return post(gateway, "/v1/score", query=[1, 2], items=items, label_token_ids=[5], priority=priority)["scores"]

    def running() -> bool:
        return "yardstick_engine_requests_running 1.0" in pod.client.get("/metrics").text

    large = [[3 + (11 * item + 17 * place) % 200 for place in range(60)] for item in range(400)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, large, 0)
        wait_until(running, seconds=60)
        assert ask([[200]], -10)
        assert running(), "the large one goes on"
        assert answer.result(timeout=120)


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


def test_a_target_is_met_and_told_of(demo: Program):
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Describe: red shoes"}], "seed": 1, "n": 8}
    guide = {"target_length": 40, "return_values": True}
    answer = demo.client.post("/v1/chat/completions", json=ask | {"length_guidance": guide, "logprobs": True, "top_logprobs": 5})
    choices = answer.raise_for_status().json()["choices"]
    lengths = [len(choice["logprobs"]["content"]) for choice in choices]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert sum(abs(length - 40) for length in lengths) / len(lengths) <= 0.15 * 40
    tops = [top for choice in choices for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]]
    assert {top["logprob"] for top in tops} <= {0.0, -9999.0}  # a hard constraint leaves one of them
    assert any(top["value"] is not None for top in tops)


def test_a_target_holds_at_every_temperature(demo: Program):
    """Continuously from 0 up: a constraint draws nothing, so the same request gives the same text at each."""
    ask = {"model": "demo", "prompt": "Describe: red shoes\n", "max_tokens": 200}
    for guide in ({"target_length": 40}, {"target_length": 40, "constraint": "ge"}, {"target_length": 9, "constraint": "le"}):
        texts = {}
        for temperature in (0, 0.01, 1.5):
            body = ask | {"temperature": temperature, "length_guidance": guide}
            (choice,) = demo.client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            texts[temperature] = choice["text"]
        assert len(set(texts.values())) == 1, texts
    plain = demo.client.post("/v1/completions", json=ask | {"temperature": 0}).json()["choices"][0]["text"]
    assert plain not in texts.values()


def test_a_client_that_leaves_ends_the_work_in_the_engine(gateway: Program, pod: Pod):
    body = {"model": "tiny", "prompt": "the", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: when it goes, the connection is closed
        next(lines)
        assert pod.read("/stats", wire.Stats).running == 1
    wait_until(lambda: pod.read("/stats", wire.Stats).running == 0)
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post("/v1/completions", json=body | {"stream": False}, timeout=httpx.Timeout(30, read=0.3))
    wait_until(lambda: pod.read("/stats", wire.Stats).running == 0)


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
