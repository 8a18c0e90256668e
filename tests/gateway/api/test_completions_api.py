"""``/v1/completions`` and ``/v1/chat/completions``, not streamed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.fakes import EOS, FakeEngine, ids, library, logprobs_after
from tests.gateway.answers import events
from tests.processes import wait_until


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(client, "completions", **{"prompt": "The fox", **body})


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(client, "chat/completions", **{"messages": [{"role": "user", "content": "The fox"}], **body})


def test_the_engine_gets_every_parameter(client: httpx.Client, engine: FakeEngine) -> None:
    sampling = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "ignore_eos": True,
        "n": 2,
    }
    complete(client, **sampling, logit_bias={"5": -100}, stop_token_ids=[7], logprobs=3, priority=-4)
    (request,) = engine.generates
    told = {name: getattr(request.sampling, name) for name in sampling}
    assert told == sampling
    assert request.sampling.logit_bias == {5: -100}
    assert request.sampling.stop_token_ids == (7,)
    assert (request.logprobs, request.priority, request.prompt) == (3, -4, ids("The fox"))


def test_defaults_are_openais(client: httpx.Client, engine: FakeEngine) -> None:
    complete(client, top_k=-1, seed=None, n=None, stop=None, logprobs=None, max_tokens=None)
    chat(client)
    first, second = engine.generates
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.top_k, first.sampling.n) == (16, 1.0, 0, 1)
    assert first.sampling.seed != second.sampling.seed
    assert second.sampling.max_tokens == engine.max_context - len(second.prompt)


def test_what_is_asked_for_beyond_the_context_is_left_out(client: httpx.Client, engine: FakeEngine) -> None:
    complete(client, prompt=[1] * 2040, max_tokens=100)
    assert engine.generates[0].sampling.max_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a fox", [ids("a fox")]),
        (["a fox", "dogs"], [ids("a fox"), ids("dogs")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_of_each_kind(client: httpx.Client, engine: FakeEngine, prompt: Any, prompts: list[list[int]]) -> None:
    answer = complete(client, prompt=prompt, max_tokens=2, n=2, seed=3, ignore_eos=True)
    assert sorted(request.prompt for request in engine.generates) == sorted(prompts)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 4 * len(prompts)
    alone = complete(client, prompt=prompts[-1], max_tokens=2, n=2, seed=3, ignore_eos=True)
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in answer["choices"][-2:]]


def test_the_ending_token_is_counted_and_not_shown(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red shoes")
    answer = complete(client, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("red shoes", "stop")
    assert answer["usage"]["completion_tokens"] == len(engine.says) + 1
    assert "".join(choice["logprobs"]["tokens"]) == "red shoes"
    kept = complete(client, include_stop_str_in_output=True, skip_special_tokens=False)
    assert kept["choices"][0]["text"] == "red shoes" + EOS


def test_stop_strings_end_the_work(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("the quick brown fox jumps over the lazy dog")
    engine.faults.delay = 0.01
    answer = complete(client, stop=["fox ju", "dog"], logprobs=1, max_tokens=500)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the quick brown ", "stop")
    assert "".join(choice["logprobs"]["tokens"]).startswith("the quick brown")
    assert choice["logprobs"]["text_offset"][-1] < len("the quick brown ")
    assert answer["usage"]["completion_tokens"] < len(engine.says)
    wait_until(lambda: engine.left == [engine.generates[0].id])
    kept = complete(client, stop="fox", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "the quick brown fox"
    later = complete(client, stop="q", min_tokens=len(ids("the quick brown")), max_tokens=500)
    assert later["choices"][0]["text"] == "the quick brown fox jumps over the lazy dog"


def test_completion_logprobs(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("the lazy dog")
    (choice,) = complete(client, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "the lazy dog"
    for place, token in enumerate(engine.says):
        row = logprobs_after(ids("The fox") + engine.says[:place], engine.vocab_size)
        assert logprobs["token_logprobs"][place] == row[token]
        assert max(logprobs["top_logprobs"][place].values()) == max(row)
        assert logprobs["top_logprobs"][place][logprobs["tokens"][place]] == row[token]
        assert logprobs["text_offset"][place] == len("".join(logprobs["tokens"][:place]))
    assert complete(client)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_likelihood_of_a_prompt(client: httpx.Client, engine: FakeEngine, max_tokens: int) -> None:
    prompt = ids("The lazy dog")
    (choice,) = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + max_tokens
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for place in range(1, len(prompt)):
        row = logprobs_after(prompt[:place], engine.vocab_size)
        assert logprobs["token_logprobs"][place] == row[prompt[place]]
        assert max(logprobs["top_logprobs"][place].values()) == max(row)
    offsets = logprobs["text_offset"]
    pieces = [choice["text"][start:end] for start, end in pairwise(offsets)]
    assert pieces[: len(prompt) - 1] == [library().decode([id]) for id in prompt[:-1]]
    assert choice["text"].startswith("The lazy dog")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_the_ending_token_after_an_echoed_prompt_has_a_logprob(client: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    """lm-eval drops the last entry, which is the generated token, and would otherwise drop one of the prompt."""
    engine.says = []
    prompt = ids("The lazy dog")
    body = {"model": "fake", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "stream": stream}
    answer = client.post("/v1/completions", json=body).raise_for_status()
    choices = [choice for part in (events(answer) if stream else [answer.json()]) for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == "The lazy dog"
    assert choices[-1]["finish_reason"] == "stop"
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["token_logprobs"]]
    tokens = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["tokens"]]
    assert len(logprobs) == len(prompt) + 1
    assert logprobs[-1] == logprobs_after(prompt, engine.vocab_size)[engine.eos]
    assert tokens[-1] == EOS


def test_chat_goes_through_the_template(client: httpx.Client, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": "shoes"}]},
        {"role": "assistant", "content": "Yes", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "blue", "tool_call_id": "1"},
    ]
    engine.says = ids("No")
    answer = chat(client, messages=messages)
    (request,) = engine.generates
    assert library().decode(request.prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nred\nshoes<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "No", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]
    chat(client, messages=messages[:1], chat_template_kwargs={"add_generation_prompt": False})
    assert library().decode(engine.generates[1].prompt, skip_special_tokens=False).endswith("Be brief.<|im_end|>\n")


def test_chat_logprobs(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("a 🦊")
    (choice,) = chat(client, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"] == "a 🦊"
    prompt = engine.generates[0].prompt
    for place, entry in enumerate(content):
        row = logprobs_after(prompt + engine.says[:place], engine.vocab_size)
        assert entry["logprob"] == row[engine.says[place]]
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(row, reverse=True)[:2]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_long_log_probabilities_are_the_same_whole_and_streamed(client: httpx.Client, engine: FakeEngine, path: str) -> None:
    """They are turned into JSON in slices: a hundred tokens that come at once, after an echoed prompt of as many."""
    engine.tokens_per_delta = 100
    prompt: dict[str, Any] = {"prompt": "red shoes, " * 30, "echo": True, "logprobs": 2}
    if path != "completions":
        prompt = {"messages": [{"role": "user", "content": "The fox"}], "logprobs": True, "top_logprobs": 2}
    body = {**prompt, "max_tokens": 100, "ignore_eos": True, "seed": 5}
    whole = post(client, path, **body)["choices"][0]
    told = events(client.post(f"/v1/{path}", json={**body, "stream": True}))
    chunks = [event["choices"][0] for event in told if event["choices"] and event["choices"][0]["logprobs"]]
    assert len(chunks) > 3
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for name, entries in whole["logprobs"].items():
        assert entries == [entry for chunk in chunks for entry in chunk["logprobs"][name]]
        assert len(entries) >= 100
    texts = [chunk["delta"].get("content") or "" if "delta" in chunk else chunk["text"] for chunk in chunks]
    assert "".join(texts) == (whole["text"] if "text" in whole else whole["message"]["content"])
