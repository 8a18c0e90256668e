"""Names and values of fields that clients of vLLM send."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.gateway.answers import check_refused, events

DOCUMENTS = ["the quick brown fox", "blue table"]
PAIRS = {"text_1": "red shoes", "text_2": DOCUMENTS}
RAW = [{"raw_scores": True}, {"use_activation": False}, {"activation": False}, {"softmax": False}]


def scores(client: httpx.Client, **body: Any) -> list[float]:
    return [entry["score"] for entry in client.post("/v1/score", json=body).raise_for_status().json()["data"]]


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


NAMES = [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")]


@pytest.mark.parametrize(("one", "two"), NAMES)
def test_pairs(shared: httpx.Client, one: str, two: str) -> None:
    """One text with many, as many as there are others, and one with one. The generic preset fits the fake model's tokeniser."""
    queries = ["red shoes", "table"]
    ranked = [shared.post("/rerank", json={"query": query, "documents": DOCUMENTS}).json()["results"] for query in queries]
    first, second = ({result["index"]: pytest.approx(result["relevance_score"]) for result in results} for results in ranked)
    assert scores(shared, **{one: queries[0], two: DOCUMENTS}) == [first[0], first[1]]
    assert scores(shared, **{one: queries, two: DOCUMENTS}) == [first[0], second[1]]
    assert scores(shared, **{one: queries[1], two: DOCUMENTS[1]}) == [second[1]]
    answer = shared.post("/score", json={one: queries[0], two: DOCUMENTS}).raise_for_status().json()
    assert (answer["object"], [entry["object"] for entry in answer["data"]]) == ("list", ["score", "score"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"),
        ({"query": "a", "labels": [" Yes"]}, "items"),
        ({"query": "a", "items": ["b"], "labels": [" Yes"], "truncate": True}, "truncate"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ({"text_1": "a", "data_1": "a", "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "items": ["c"]}, "items"),
        ({"queries": "a", "items": []}, "items"),
        ({"queries": "a", "items": ["b", [1, 2]]}, "items[1]"),
        ({"queries": "a", "items": ["b"], "documents": ["c"]}, "text_2"),
        ({"queries": "a", "items": ["b"], "labels": [" Yes"]}, "labels"),
        ({"data_1": "a", "data_2": "b", "catalogue": "c", "ids": ["a"]}, "data_1"),
    ],
)
def test_forms_are_not_mixed(shared: httpx.Client, body: dict[str, Any], param: str) -> None:
    shared.put("/v1/catalogues/c", json={"labels": [" Yes"]}).raise_for_status()
    shared.put("/v1/catalogues/c/items", json=[{"id": "a", "text": "b"}]).raise_for_status()
    check_refused(shared.post("/v1/score", json=body), param)


@pytest.mark.parametrize("raw", RAW)
def test_scores_of_pairs_and_ranks_before_the_activation(shared: httpx.Client, raw: dict[str, bool]) -> None:
    logits = [logit(score) for score in scores(shared, **PAIRS)]
    assert scores(shared, **PAIRS, **raw) == pytest.approx(logits)
    ranked = shared.post("/rerank", json={"query": "red shoes", "documents": DOCUMENTS} | raw).raise_for_status().json()
    assert {rank["index"]: rank["relevance_score"] for rank in ranked["results"]} == pytest.approx(dict(enumerate(logits)))
    streamed = events(shared.post("/v1/score", json=PAIRS | raw | {"stream": True}))
    sent = [entry for event in streamed for entry in event["data"]]
    assert {entry["index"]: entry["score"] for entry in sent} == pytest.approx(dict(enumerate(logits)))


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
def test_an_activation_that_is_asked_for(shared: httpx.Client, name: str) -> None:
    assert scores(shared, **PAIRS, **{name: True}) == scores(shared, **PAIRS)
    labels = {"query": "a", "items": ["b"], "labels": [" Yes"], name: True}
    check_refused(shared.post("/v1/score", json=labels), name, "apply_softmax")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_that_is_cut(shared: httpx.Client, side: str) -> None:
    body = {"text_1": "red", "text_2": ["one two three four five six seven eight"], "max_tokens_per_doc": 4}
    expected = scores(shared, **body, truncation_direction=side)
    assert scores(shared, **body, truncation_side=side) == expected
    assert scores(shared, **body, truncation_side=side, truncation_direction=None) == expected
    assert (scores(shared, **body, truncation_direction=None) == expected) == (side == "right")


def test_zero_tokens_mean_no_limit(shared: httpx.Client) -> None:
    assert scores(shared, **PAIRS, max_tokens_per_doc=0, max_tokens_per_query=0) == scores(shared, **PAIRS)


def test_a_refusal_in_an_earlier_answer_is_text(shared: httpx.Client) -> None:
    def tokens(content: Any) -> list[int]:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}, {"role": "user", "content": "b"}]
        found: list[int] = shared.post("/tokenize", json={"messages": messages}).raise_for_status().json()["tokens"]
        return found

    assert tokens([{"type": "refusal", "refusal": "I cannot."}]) == tokens("I cannot.")


def test_an_unknown_kind_of_part_names_the_known_ones(shared: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
    answer = shared.post("/v1/chat/completions", json={"messages": messages})
    words = "invalid value 'input_audio'; it is one of 'text', 'image_url', 'refusal'."
    check_refused(answer, "messages[0].content[0].type", words)
