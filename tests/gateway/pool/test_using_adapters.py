"""Requests that name adapters: names, routing, caches, catalogues, and adapters that come and go."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, adapter, ids, logprobs_after, seasoned
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire

RED, BLUE, GREEN = adapter("aa11", "red"), adapter("bb22", "blue"), adapter("cc33", "red")
QUERY, ITEMS, LABELS = [1, 2, 3], [[4], [5, 6]], [7, 8]


def engine(model: str = "one", *adapters: wire.Adapter, **fields: Any) -> FakeEngine:
    return FakeEngine(model, f"{model}-1", adapters={each.name: each for each in adapters}, **fields)


def score(client: httpx.Client, model: str, **body: Any) -> httpx.Response:
    asked = {"model": model, "query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
    return client.post("/v1/score", json=asked | body)


def expected(digest: str, prompts: list[list[int]] | None = None, labels: list[int] = LABELS) -> list[Any]:
    rows = [logprobs_after(seasoned(prompt, digest), FakeEngine().vocab_size) for prompt in prompts or [QUERY + i for i in ITEMS]]
    return [pytest.approx([math.exp(row[label]) for label in labels]) for row in rows]


def models(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in client.get("/v1/models").json()["data"]}


def knows(client: httpx.Client, *names: str) -> None:
    wait_until(lambda: set(names) <= models(client).keys())


def test_an_adapter_has_scores_of_its_own_under_both_names(start: Start) -> None:
    one = engine("one", RED, BLUE)
    client = start(one)
    knows(client, "red", "blue")
    assert score(client, "one").json()["scores"] == expected("")
    for name, digest in (("red", RED.digest), ("one:red", RED.digest), ("blue", BLUE.digest)):
        answer = score(client, name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert answer.json()["scores"] == expected(digest)
    assert [each.adapter for each in one.scores] == ["", RED.digest, BLUE.digest]  # `one:red` came from the cache
    assert score(client, "red").headers["x-yardstick-cache"] == "2/2"
    assert metric(client, 'yardstick_adapter_requests_total{adapter="red",model="one"}') == 3
    assert metric(client, 'yardstick_adapters{model="one"}') == 2


def test_every_endpoint_takes_adapters(start: Start) -> None:
    head = adapter("dd44", "head", ("classify",), classes=["bad", "good"])
    one = engine("one", RED, head, capabilities=("score", "generate"))
    client = start(one)
    knows(client, "red", "head")
    talk = [{"role": "user", "content": "a"}]
    for path, body, seen in (
        ("completions", {"prompt": [1, 2], "max_tokens": 2}, one.generates),
        ("chat/completions", {"messages": talk, "max_tokens": 2}, one.generates),
        ("chat/completions", {"messages": talk, "max_tokens": 2, "stream": True}, one.generates),
        ("responses", {"input": "a", "max_output_tokens": 2}, one.generates),
        ("rerank", {"query": "a", "documents": ["b", "c"]}, one.scores),
        ("score", {"query": [1], "items": [[2]], "label_token_ids": [3], "item_first": True}, one.item_scores),
        ("score", {"query": "a", "items": ["b"], "readout": "likelihood"}, one.scores),
    ):
        before = len(seen)
        answer = client.post(f"/v1/{path}", json={"model": "one:red", **body})
        assert answer.status_code == 200, answer.text
        assert "one:red" in answer.text, path
        assert [each.adapter for each in seen[before:]] == [RED.digest], path
    classified = client.post("/v1/classify", json={"model": "head", "input": ["a"]})
    assert classified.status_code == 200, classified.text
    assert classified.json()["data"][0]["label"] in ("bad", "good")
    assert (one.scores[-1].adapter, one.scores[-1].readout) == (head.digest, wire.Classes())
    refused = client.post("/v1/classify", json={"model": "red", "input": ["a"]})
    assert refused.status_code == 400
    tokens = [client.post("/v1/tokenize", json={"model": name, "prompt": "red shoes"}).json() for name in ("one", "red", "one:red")]
    assert tokens[0] == tokens[1] == tokens[2]
    assert client.get("/tokenizer_info", params={"model": "red"}).status_code == 200


def test_models_lists_adapters_with_their_parent(start: Start) -> None:
    client = start(engine("one", RED), aliases=("nick=one",))
    knows(client, "red")
    listed = models(client)
    assert set(listed) == {"one", "nick", "red"}
    shown = listed["red"]
    assert (shown["root"], shown["parent"], shown["digest"]) == ("one:red", "one", RED.digest)
    assert shown["capabilities"] == ["score", "generate"]
    assert (listed["one"]["root"], listed["one"]["parent"], listed["one"]["digest"]) == ("one", None, None)
    assert client.get("/v1/models/red").json() == shown
    assert score(client, "nick:red").json()["model"] == "nick:red"


def test_ambiguous_names_need_the_base(start: Start) -> None:
    client = start(engine("one", RED, adapter("ee55", "two")), engine("two", GREEN))
    wait_until(lambda: {"one:red", "two:red", "one:two"} <= models(client).keys())
    assert set(models(client)) == {"one", "two", "one:red", "two:red", "one:two"}
    refused = score(client, "red")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "BASE:red" in refused.json()["error"]["message"]
    assert score(client, "one:red").json()["scores"] == expected(RED.digest)
    assert score(client, "two:red").json()["scores"] == expected(GREEN.digest)
    assert score(client, "two").json()["scores"] == expected("")  # a model comes before an adapter of its name
    for odd in ("one:", ":red", "one:red:red", "one:*", "one:../red", "one:RED", "x" * 5000, "\u0000", "one: red"):
        assert score(client, odd).json()["error"]["code"] == "model_not_found", odd


def test_requests_go_to_replicas_that_have_the_adapter(start: Start) -> None:
    first, second = engine("one", RED), engine("one", BLUE)
    client = start(first, second)
    knows(client, "red", "blue")
    for place in range(6):
        assert score(client, "red", query=[place]).status_code == 200
    assert (len(first.scores), len(second.scores)) == (6, 0)
    assert score(client, "blue").status_code == 200
    assert [each.adapter for each in second.scores] == [BLUE.digest]


def test_a_replica_that_lost_the_adapter_is_replaced_and_asked_again(start: Start) -> None:
    engines = first, second = engine("one", RED), engine("one", RED)
    client = start(first, second, probe_seconds=30)  # no probe tells in time
    knows(client, "red")
    for each in engines:
        each.adapters.pop("red")
        for place in range(8):
            answer = score(client, "red", query=[engines.index(each), place])
            if each is first:
                assert answer.status_code == 200, answer.text
        if each is first:
            wait_until(lambda: first.asked_for_adapters > 1)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "red" not in models(client)
    second.adapters["red"] = RED
    assert score(client, "one").status_code == 200


def test_a_replaced_adapter_never_answers_from_old_results(start: Start) -> None:
    one = engine("one", RED)
    client = start(one, probe_seconds=30)
    knows(client, "red")
    assert score(client, "red").json()["scores"] == expected(RED.digest)
    one.adapters["red"] = GREEN
    unknown = score(client, "red", query=[9])
    assert unknown.status_code in (404, 503)  # the gateway learns it from this failure
    wait_until(lambda: models(client).get("red", {}).get("digest") == GREEN.digest)
    assert score(client, "red").json()["scores"] == expected(GREEN.digest)


def test_a_generation_goes_on_only_with_the_same_weights(start: Start) -> None:
    first, second = engine("one", RED), engine("one", GREEN)
    client = start(first, second)
    wait_until(lambda: models(client).get("red") is not None)
    first.faults.break_after = second.faults.break_after = 1
    body = {"model": "red", "prompt": [1, 2], "max_tokens": 30, "ignore_eos": True, "seed": 1}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code >= 500
    digests = {each.adapter for fake in (first, second) for each in fake.generates}
    assert len(digests) == 1


def test_catalogues_are_shared_and_their_scores_are_not(start: Start) -> None:
    one, two = engine("one", RED), engine("two", BLUE)
    client = start(one, two)
    knows(client, "red", "blue")
    created = {"model": "one", "template": "{item}{query}", "labels": [" Yes"]}
    client.put("/v1/catalogues/c", json=created).raise_for_status()
    client.put("/v1/catalogues/c/items", json=[{"id": "a", "text": "red shoes"}]).raise_for_status()
    asked = {"catalogue": "c", "ids": ["a"], "query": " good"}
    prompt, labels = ids("red shoes good"), ids(" Yes")
    assert client.post("/v1/score", json=asked).json()["scores"] == expected("", [prompt], labels)
    for name in ("red", "one:red"):
        answer = client.post("/v1/score", json={**asked, "model": name}).json()
        assert (answer["model"], answer["scores"]) == (name, expected(RED.digest, [prompt], labels))
    assert client.post("/v1/score", json={**asked, "model": "blue"}).status_code == 400
    client.put("/v1/catalogues/d", json=created | {"model": "red"}).raise_for_status()
    client.put("/v1/catalogues/d/items", json=[{"id": "a", "text": "red shoes"}]).raise_for_status()
    assert client.post("/v1/score", json={**asked, "catalogue": "d"}).json()["scores"] == expected(RED.digest, [prompt], labels)
    whole = client.post("/v1/score", json={"catalogue": "d", "query": " good", "model": "one", "top_n": 1})
    assert whole.json()["scores"] == expected("", [prompt], labels), whole.text


def test_an_adapter_of_a_model_that_starts_is_awaited(start: Start) -> None:
    one = engine("one", RED)
    client = start(one)
    knows(client, "red")
    one.ready = False
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 0)
    assert score(client, "red", query=[9]).status_code == 503
    assert score(client, "one:blue").status_code == 503  # it may have come with the next start
    one.ready = True
    wait_until(lambda: score(client, "red", query=[9]).status_code == 200)
