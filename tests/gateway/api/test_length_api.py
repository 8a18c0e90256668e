"""``/v1/length`` before fake engines."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.fakes import LIMITS, FakeEngine, ids, value_logit
from tests.gateway.answers import check_refused, told
from tests.gateway.conftest import Start, metric, metrics

CONVERSATION = [{"role": "user", "content": "The fox"}]
RENDERED = "<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n"


def length(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/length", json=body, headers={"cache-control": "no-cache"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(answer: dict[str, Any], texts: list[list[int]], gamma: float = 0.985) -> None:
    """``answer`` is the fake length model's about ``texts``."""
    assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
    for entry, text in zip(answer["data"], texts, strict=True):
        value = 1 / (1 + math.exp(-value_logit(text)))
        assert entry["value"] == pytest.approx(value, rel=1e-12)
        assert entry["remaining_tokens"] == pytest.approx(math.log(1 - value) / math.log(gamma), rel=1e-9)
    tokens = sum(map(len, texts))
    assert answer["gamma"] == gamma
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("name", ["input", "prompt"])
@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("The fox", [ids("The fox")]),
        (["The fox jumps", "The fox", "The dog"], [ids("The fox jumps"), ids("The fox"), ids("The dog")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2, 3], [1, 2], [1]], [[1, 2, 3], [1, 2], [1]]),
        ([[7], [7]], [[7], [7]]),
    ],
)
def test_whole_texts(client: httpx.Client, name: str, given: Any, texts: list[list[int]]) -> None:
    answer = length(client, **{name: given, "model": "fake"})
    check(answer, texts)
    assert (answer["object"], answer["model"]) == ("length", "fake")
    assert answer["id"].startswith("length-")


def test_values_are_cached_like_scores(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"input": [[8, 9, 1], [8, 9, 2]]}
    first, again = client.post("/v1/length", json=body), client.post("/v1/length", json=body)
    assert [answer.headers["x-yardstick-cache"] for answer in (first, again)] == ["0/2", "2/2"]
    assert first.json()["data"] == again.json()["data"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert len(engine.values) == 1


def test_what_texts_have_in_common_is_sent_once(client: httpx.Client, engine: FakeEngine) -> None:
    length(client, input=[[1, 2, 3, 4], [1, 2, 3], [1, 2, 5]])
    length(client, input=[1, 2, 3], priority=2)
    first, second = engine.values
    assert (first.prefix, first.branches) == ([1, 2], [[3, 4], [3], [5]])
    assert (second.prefix, second.branches, second.priority) == ([1, 2], [[3]], 2)


@pytest.mark.parametrize("partial", ["", " jumps", ["", " jumps", " jumped over"]])
def test_partial_answers(client: httpx.Client, partial: str | list[str]) -> None:
    several = [partial] if isinstance(partial, str) else partial
    check(length(client, prompt="The fox", partial=partial), [ids("The fox" + text) for text in several])
    check(length(client, messages=CONVERSATION, partial=partial), [ids(RENDERED + text) for text in several])


def test_partial_answers_as_tokens(client: httpx.Client) -> None:
    check(length(client, prompt=[1, 2], partial=[3]), [[1, 2, 3]])
    check(length(client, prompt=[1, 2], partial=[[3], [4, 5], []]), [[1, 2, 3], [1, 2, 4, 5], [1, 2]])


def test_a_conversation(client: httpx.Client) -> None:
    check(length(client, messages=CONVERSATION), [ids(RENDERED)])
    ended = length(client, messages=CONVERSATION, chat_template_kwargs={"add_generation_prompt": False})
    check(ended, [ids("<|im_start|>user\nThe fox<|im_end|>\n")])


def test_gamma_may_be_another(client: httpx.Client) -> None:
    check(length(client, input="The fox", gamma=0.5), [ids("The fox")], gamma=0.5)


def test_many_texts_are_cut_and_merged_in_order(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine)
    texts = [[9, place % 250, place // 250] for place in range(1000)]
    check(length(client, input=texts), texts)
    assert len(engine.values) == math.ceil(1000 / LIMITS.max_branches)
    assert {tuple(request.prefix) for request in engine.values} == {(9,)}
    assert metric(client, 'yardstick_lenvm_values_total{model="fake"}') == 1000


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "Give one of"),
        ({"input": "a", "prompt": "b"}, "prompt", "Give one of"),
        ({"input": "a", "partial": "b"}, "partial", "whole texts"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["a", 1]}, "input", "mixes kinds"),
        ({"input": [10**6]}, "input[0]", "not a token"),
        ({"input": [[1], [-1]]}, "input[1][0]", "`int` >= 0"),
        ({"input": [1] * 2049}, "input", "context"),
        ({"input": ["a"] * 10_001}, "input", "at most 10000"),
        ({"prompt": "", "partial": ["a", ""]}, "partial[1]", "empty"),
        ({"prompt": "a", "partial": [1]}, "partial", "which is text"),
        ({"prompt": [1], "partial": "b"}, "partial", "which is token ids"),
        ({"prompt": [1], "partial": [[2], 3]}, "partial", "which is token ids"),
        ({"prompt": [1], "partial": [[2], [10**6]]}, "partial[1][0]", "not a token"),
        ({"prompt": [10**6], "partial": [[2]]}, "prompt[0]", "not a token"),
        ({"prompt": ["a", "b"], "partial": "c"}, "partial", "one prompt"),
        ({"messages": CONVERSATION, "partial": [1]}, "partial", "which is text"),
        ({"messages": CONVERSATION, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not set"),
        ({"input": "a", "gamma": 1}, "gamma", "< 1"),
        ({"input": "a", "gamma": "NaN"}, "gamma", "got `str`"),
    ],
)
def test_wrong_requests(shared: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    check_refused(shared.post("/v1/length", json=body), param, words)


def test_a_model_without_a_length_model(start: Start) -> None:
    client = start(FakeEngine(capabilities=("score", "generate")))
    check_refused(client.post("/v1/length", json={"input": "a"}), "model", "no length model")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_an_error(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr("tests.fakes.value_logit", lambda _: bad)
    answer = client.post("/v1/length", json={"input": "a"})
    assert (answer.status_code, told(answer)["code"]) == (500, "not_a_number")


@pytest.mark.parametrize("logit", [-800.0, -40.0, -1.0, 0.0, 1.0, 40.0, 800.0])
def test_values_are_exact_also_where_they_round(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, logit: float) -> None:
    monkeypatch.setattr("tests.fakes.value_logit", lambda _: logit)
    (entry,) = length(client, input=[[1, 2]], gamma=0.997)["data"]
    assert 0 <= entry["value"] <= 1
    survival = -math.log1p(math.exp(logit)) if logit < 700 else -logit
    assert entry["remaining_tokens"] == pytest.approx(survival / math.log(0.997), rel=1e-12)
    if logit < 0:
        return
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 2, "length_guidance": {"scale": 1, "return_values": True}}
    rows = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["logprobs"]["top_values"]
    assert all(math.isfinite(value) for row in rows for value in row.values()), "a value that rounded to one, too"


FORECASTS = [f'yardstick_expected_tokens_{name}model="fake"}}' for name in ("count{", 'bucket{le="64.0",', "sum{")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/chat/completions", {"messages": CONVERSATION, "n": 2}, 2),
        ("/v1/completions", {"prompt": "The fox"}, 1),
        ("/v1/responses", {"input": "The fox"}, 1),
    ],
)
def test_forecasts_are_a_header_and_a_metric(
    client: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any], sequences: int, stream: bool
) -> None:
    before, engine.forecast = metrics(client, *FORECASTS), 40.4
    limit = {"max_output_tokens" if "input" in body else "max_tokens": 3}
    answer = client.post(path, json=body | limit | {"stream": stream})
    assert (answer.status_code, answer.headers["x-yardstick-expected-tokens"]) == (200, str(round(40.4 * sequences)))
    engine.forecast = 0.0
    assert "x-yardstick-expected-tokens" not in client.post(path, json=body | limit | {"stream": stream}).headers
    more = [after - old for after, old in zip(metrics(client, *FORECASTS), before, strict=True)]
    assert more == [1, 1, pytest.approx(40.4)]
