"""Parameters of vLLM on completions and chat completions: log-probabilities and token ids of prompts, and how a prompt ends."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, library, logprobs_after
from tests.gateway.answers import events, rendered

PROMPT = "The quick fox"


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(client: httpx.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    return post(client, "completions", status, **{"prompt": PROMPT, "max_tokens": 6, "seed": 5, "ignore_eos": True, **body})


def chat(client: httpx.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return post(client, "chat/completions", status, **{"messages": messages, "max_tokens": 6, "seed": 5, **body})


def chunks(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    return events(client.post(f"/v1/{path}", json=body | {"stream": True}))


def check_prompt_logprobs(told: list[Any], prompt: list[int], top: int, vocab_size: int) -> None:
    assert told[0] is None
    assert len(told) == len(prompt)
    for place in range(1, len(prompt)):
        row = logprobs_after(prompt[:place], vocab_size)
        best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:top]
        assert {int(id) for id in told[place]} == {*best, prompt[place]}
        for id, entry in told[place].items():
            assert entry["logprob"] == row[int(id)]
            assert entry["rank"] == (best.index(int(id)) + 1 if int(id) in best else None)
            assert isinstance(entry["decoded_token"], str)


def test_log_probabilities_of_prompts(client: httpx.Client, engine: FakeEngine) -> None:
    answer = complete(client, prompt=[PROMPT, "Yes"], prompt_logprobs=2, n=2)
    first, second, third, fourth = answer["choices"]
    check_prompt_logprobs(first["prompt_logprobs"], ids(PROMPT), 2, engine.vocab_size)
    check_prompt_logprobs(third["prompt_logprobs"], ids("Yes"), 2, engine.vocab_size)
    assert "prompt_logprobs" not in second  # `n` must not multiply the size of the answer
    assert "prompt_logprobs" not in fourth
    said = chat(client, prompt_logprobs=0)
    check_prompt_logprobs(said["prompt_logprobs"], engine.generates[-1].prompt, 0, engine.vocab_size)


def test_an_echo_has_its_own_number_of_log_probabilities(client: httpx.Client, engine: FakeEngine) -> None:
    both = complete(client, prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
    alone = complete(client, echo=True, logprobs=1)["choices"][0]
    check_prompt_logprobs(both.pop("prompt_logprobs"), ids(PROMPT), 3, engine.vocab_size)
    assert both == alone
    silent = complete(client, prompt_logprobs=1, echo=True)["choices"][0]
    assert silent["text"] == alone["text"]
    assert silent["logprobs"] is None


def test_log_probabilities_of_prompts_have_bounds(shared: httpx.Client) -> None:
    for path in (complete, chat):
        for body in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
            assert path(shared, 400, **body)["error"]["param"] == "prompt_logprobs"


def test_token_ids(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red running")
    for prompt in (PROMPT, [PROMPT, "Yes"]):
        answer = complete(client, prompt=prompt, return_token_ids=True, n=2, ignore_eos=False)
        shown = [choice.get("prompt_token_ids") for choice in answer["choices"]]
        assert shown == ([ids(PROMPT), None] if prompt == PROMPT else [ids(PROMPT), None, ids("Yes"), None])
        assert all(choice["token_ids"] == [*engine.says, engine.eos][:6] for choice in answer["choices"])
    said = chat(client, return_token_ids=True)
    assert said["prompt_token_ids"] == engine.generates[-1].prompt
    assert said["choices"][0]["token_ids"] == [*engine.says, engine.eos][:6]
    assert "token_ids" not in chat(client)["choices"][0]


def test_token_ids_in_streams(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"prompt": [PROMPT, "Yes"], "n": 2, "return_token_ids": True, "max_tokens": 6, "seed": 5}
    whole, parts = complete(client, **body), chunks(client, "completions", **body)
    ids_of: dict[int, list[int]] = {}
    prompts = {}
    for part in parts:
        (choice,) = part["choices"]
        ids_of.setdefault(choice["index"], []).extend(choice["token_ids"])
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts
            prompts[choice["index"]] = choice["prompt_token_ids"]
    assert prompts == {0: ids(PROMPT), 2: ids("Yes")}
    assert ids_of == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    talk = {"messages": [{"role": "user", "content": PROMPT}], "return_token_ids": True, "max_tokens": 6, "seed": 5}
    first, *rest = chunks(client, "chat/completions", **talk)
    assert first["prompt_token_ids"] == engine.generates[-1].prompt
    assert not any("prompt_token_ids" in part for part in rest)
    streamed = [id for part in rest for id in part["choices"][0]["token_ids"]]
    assert streamed == chat(client, return_token_ids=True)["choices"][0]["token_ids"]


def test_a_stop_text_ends_the_token_ids(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red running shoes")
    choice = complete(client, stop="running", return_token_ids=True)["choices"][0]
    assert choice["text"] == "red "
    assert library().decode(choice["token_ids"]) == "red running"


def test_tokens_shown_as_ids(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = complete(client, **body)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for row in choice["logprobs"]["top_logprobs"] for name in row)
    said = chat(client, **(body | {"logprobs": True, "top_logprobs": 2}))["choices"][0]
    entries = said["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in said["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])


def test_the_best_of_several_completions(client: httpx.Client, engine: FakeEngine) -> None:
    drawn = complete(client, prompt=[PROMPT, "Yes"], n=4, logprobs=0, ignore_eos=False)
    best = complete(client, prompt=[PROMPT, "Yes"], n=2, best_of=4, ignore_eos=False)

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    ranked = [sorted(drawn["choices"][begin : begin + 4], key=mean, reverse=True)[:2] for begin in (0, 4)]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for four in ranked for choice in four]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == drawn["usage"]["completion_tokens"]
    told = complete(client, best_of=3, logprobs=1, echo=True)["choices"]
    assert len(told) == 1
    assert told[0]["text"].startswith(PROMPT)
    assert len(told[0]["logprobs"]["tokens"]) == len(ids(PROMPT)) + 6


@pytest.mark.parametrize("body", [{"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 9}, {"best_of": 0}])
def test_best_of_is_bounded(shared: httpx.Client, body: dict[str, Any]) -> None:
    assert complete(shared, 400, **body)["error"]["param"] == "best_of"


START, END = "<|im_start|>", "<|im_end|>"
ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "red <|im_end|> shoes "}]


def test_a_message_is_continued(client: httpx.Client, engine: FakeEngine) -> None:
    chat(client, messages=ANSWERED, continue_final_message=True)
    assert rendered(engine) == f"{START}user\na{END}\n{START}assistant\nred <|im_end|> shoes "
    assert engine.generates[-1].prompt.count(engine.eos) == 1  # the user's text is no control token
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    chat(client, messages=parts, continue_final_message=True, add_generation_prompt=False)
    assert rendered(engine) == f"{START}user\na\nb"
    asked = {"messages": ANSWERED, "continue_final_message": True}
    chat(client, **asked)
    assert post(client, "tokenize", **asked)["tokens"] == engine.generates[-1].prompt


def test_a_prompt_without_the_beginning_of_an_answer(client: httpx.Client, engine: FakeEngine) -> None:
    chat(client, add_generation_prompt=False)
    assert rendered(engine) == f"{START}user\n{PROMPT}{END}\n"
    chat(client, add_generation_prompt=True, add_special_tokens=True)
    assert rendered(engine) == f"{START}user\n{PROMPT}{END}\n{START}assistant\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_continued_is_refused(shared: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert chat(shared, 400, **body)["error"]["param"] == param
