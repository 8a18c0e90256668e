"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info`` before fake engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import EOS, TEMPLATE, FakeEngine, ids, library
from tests.gateway.answers import check_refused, told
from tests.gateway.conftest import Start
from tests.gateway.keys import entry, write

CONVERSATION = [{"role": "user", "content": "The fox"}]
RENDERED = "<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n"
TEXTS = ["", "red running shoes", "naïve 🦊 東京", f"a{EOS}b", " \n\t"]


def tokenize(client: httpx.Client, path: str = "/tokenize", **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)
    return answer.json()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_becomes_the_librarys_tokens(shared: httpx.Client, path: str, text: str) -> None:
    encoding = library().encode(text)
    answer = tokenize(shared, path, prompt=text, model="fake")
    assert answer == {"count": len(encoding.ids), "max_model_len": 2048, "tokens": encoding.ids, "token_strs": None}
    spelled = tokenize(shared, path, prompt=text, return_token_strs=True)
    assert spelled == answer | {"token_strs": encoding.tokens}


def test_a_conversation_becomes_the_tokens_of_the_chat_endpoint(client: httpx.Client, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": f"The fox{EOS}"}]
    client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert tokenize(client, messages=messages)["tokens"] == engine.generates[0].prompt
    assert tokenize(client, messages=CONVERSATION)["tokens"] == ids(RENDERED)
    assert tokenize(client, messages=CONVERSATION, add_special_tokens=True)["tokens"] == ids(RENDERED), "it adds none"


@pytest.mark.parametrize(
    "body",
    [
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"add_generation_prompt": True}, "add_generation_prompt": False},
    ],
)
def test_a_conversation_without_the_beginning_of_an_answer(shared: httpx.Client, body: dict[str, Any]) -> None:
    assert tokenize(shared, messages=CONVERSATION, **body)["tokens"] == ids(f"<|im_start|>user\nThe fox{EOS}\n")


@pytest.mark.slow
def test_a_text_longer_than_the_context_is_tokenised(shared: httpx.Client) -> None:
    text = "the quick brown fox 🦊 " * 5_000
    answer = tokenize(shared, prompt=text, return_token_strs=True)
    assert answer["tokens"] == ids(text)
    assert len(answer["token_strs"]) == answer["count"] > answer["max_model_len"]
    assert shared.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_become_their_text(shared: httpx.Client, path: str, text: str) -> None:
    assert tokenize(shared, path, tokens=library().encode(text).ids, model="fake") == {"prompt": text}


@pytest.mark.parametrize("repeats", [1, 5000])
def test_a_part_of_a_character_becomes_a_replacement_character(shared: httpx.Client, repeats: int) -> None:
    fox = ids("🦊")
    assert len(fox) == 4
    assert tokenize(shared, "/detokenize", tokens=[fox[0], *fox * repeats])["prompt"] == "\ufffd" + "🦊" * repeats


def test_padding_of_the_models_head_has_no_text(shared: httpx.Client) -> None:
    assert tokenize(shared, "/detokenize", tokens=[library().get_vocab_size()]) == {"prompt": ""}


def test_the_tokenisers_configuration(shared: httpx.Client) -> None:
    answer = shared.get("/tokenizer_info")
    assert answer.status_code == 200
    assert answer.json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "chat_template": TEMPLATE,
        "bos_token": None,
        "eos_token": EOS,
        "unk_token": None,
        "sep_token": None,
        "pad_token": None,
        "cls_token": None,
        "mask_token": None,
    }


def test_the_model_is_named_where_several_are_served(start: Start) -> None:
    client = start(FakeEngine(model="a", max_context=100), FakeEngine(model="b"))
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        check_refused(client.post(path, json=body), "model")
        assert client.post(path, json=body | {"model": "b"}).status_code == 200
        assert client.post(path, json=body | {"model": "c"}).status_code == 404
    assert client.get("/tokenizer_info").status_code == 400
    assert client.get("/tokenizer_info", params={"model": "a"}).json()["model_max_length"] == 100
    assert client.get("/tokenizer_info", params={"model": "c"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("tokenize", {}, "prompt", "either"),
        ("tokenize", {"prompt": "a", "messages": CONVERSATION}, "messages", "either"),
        ("tokenize", {"prompt": ["a"]}, "prompt", "got `array`"),
        ("tokenize", {"messages": []}, "messages", "length >= 1"),
        ("tokenize", {"messages": CONVERSATION, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "must not set"),
        ("tokenize", {"messages": CONVERSATION, "chat_template": "x"}, "chat_template", "own chat template"),
        ("tokenize", {"messages": CONVERSATION, "tools": [{}]}, "tools[0]", "missing"),
        ("tokenize", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "not truncated"),
        ("detokenize", {}, "tokens", "missing"),
        ("detokenize", {"tokens": "a"}, "tokens", "got `str`"),
        ("detokenize", {"tokens": [1, -1]}, "tokens[1]", "`int` >= 0"),
        ("detokenize", {"tokens": [10**30]}, "tokens[0]", "is not a token"),
        ("detokenize", {"tokens": [[1]]}, "tokens[0]", "got `array`"),
        ("detokenize", {"tokens": [1] * (1 << 20) + [1]}, "tokens", "length <= 1048576"),
    ],
)
def test_wrong_requests(shared: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    check_refused(shared.post(f"/{path}", json=body), param, words)


def test_work_is_bounded(start: Start) -> None:
    client = start(FakeEngine(), max_request_tokens=10, max_request_characters=1000)
    for path, body, param, words in (
        ("/tokenize", {"prompt": "fox " * 100}, "prompt", "max_request_tokens"),
        ("/tokenize", {"messages": CONVERSATION * 10}, "messages", "max_request_tokens"),
        ("/tokenize", {"prompt": "x" * 1001}, "prompt", "max_request_characters"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1001}]}, "messages", "max_request_characters"),
        ("/detokenize", {"tokens": [5] * 11}, "tokens", "max_request_tokens"),
        ("/detokenize", {"tokens": [5] * 100_000}, "tokens", "max_request_tokens"),
    ):
        check_refused(client.post(path, json=body), param, words)
    assert client.post("/tokenize", json={"prompt": "fox"}).status_code == 200


def test_a_model_without_a_chat_template(start: Start) -> None:
    client = start(FakeEngine(template=""))
    assert client.get("/tokenizer_info").json()["chat_template"] == ""
    assert tokenize(client, prompt="fox")["tokens"] == ids("fox")


def test_tokens_are_charged_like_those_of_a_prompt(start: Start, tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", entry("secret", tokens_per_minute=100, items_per_minute=5))
    client = start(FakeEngine(), api_keys_file=keys)
    for path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"):
        assert client.post(path, json={"prompt": "a", "tokens": [5]}).status_code == 401
    assert client.get("/tokenizer_info").status_code == 401
    client.headers["authorization"] = "Bearer secret"
    assert client.get("/tokenizer_info").status_code == 200
    answer = client.post("/tokenize", json={"prompt": "a" * 30})
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 100 - answer.json()["count"]
    assert answer.headers["x-ratelimit-remaining-items"] == "5"
    answer = client.post("/detokenize", json={"tokens": [5] * 40})
    assert left - 40 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= left - 38
    refused = client.post("/detokenize", json={"tokens": [5] * 101})
    assert (refused.status_code, told(refused)["code"]) == (429, "rate_limit_exceeded")
