"""``/v1/score`` with the readout ``likelihood``, before fake engines."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, library, logprobs_after
from tests.gateway.answers import check_refused, events

QUERY = "Is it relevant?"
ITEMS = [" red shoes", " blue table", " the lazy dog"]


def own(item: str) -> list[int]:
    return ids(QUERY + item)[len(ids(QUERY)) :]


def expected(engine: FakeEngine, query: list[int], item: list[int]) -> list[float]:
    return [logprobs_after(query + item[:at], engine.vocab_size)[token] for at, token in enumerate(item)]


def ask(client: httpx.Client, **body: Any) -> Any:
    answer = client.post("/v1/score", json={"query": QUERY, "items": ITEMS, "readout": "likelihood"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_likelihoods_are_of_the_items_own_tokens(client: httpx.Client, engine: FakeEngine) -> None:
    answer = ask(client, return_token_logprobs=True)
    assert answer["object"] == "likelihood"
    for index, (item, found) in enumerate(zip(ITEMS, answer["data"], strict=True)):
        logprobs = expected(engine, ids(QUERY), own(item))
        assert found == {
            "index": index,
            "logprob": pytest.approx(sum(logprobs)),
            "mean_logprob": pytest.approx(sum(logprobs) / len(logprobs)),
            "tokens": len(logprobs),
            "is_greedy": False,
            "token_logprobs": pytest.approx(logprobs),
        }
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(QUERY + item)) for item in ITEMS)
    (request,) = engine.scores
    assert request.prefix == ids(QUERY)
    assert "token_logprobs" not in ask(client)["data"][0]


def test_one_item_all_equal_items_and_ids_give_the_same(shared: httpx.Client) -> None:
    first = ask(shared)["data"][0]
    assert ask(shared, items=ITEMS[:1])["data"] == [first]
    assert ask(shared, items=ITEMS[0])["data"] == [first]
    assert ask(shared, items=ITEMS[:1] * 3)["data"] == [first | {"index": index} for index in range(3)]
    assert ask(shared, query=ids(QUERY), items=[own(ITEMS[0])])["data"] == [first]
    together = [" red shoes and", " red shoes or"]
    assert [item["tokens"] for item in ask(shared, items=together)["data"]] == [len(own(item)) for item in together]


def test_greedy_items_are_named(client: httpx.Client, engine: FakeEngine) -> None:
    query = ids(QUERY)
    item: list[int] = []
    for _ in range(4):
        row = logprobs_after(query + item, engine.vocab_size)
        item.append(row.index(max(row)))
    other = [*item[:3], (item[3] + 1) % engine.vocab_size]
    answer = ask(client, query=query, items=[item, other])
    assert [found["is_greedy"] for found in answer["data"]] == [True, False]


def seam() -> tuple[str, str]:
    """A query and an item whose seam is inside a token."""
    token = next(token for id in range(library().get_vocab_size()) if len(token := library().decode([id])) > 2 and token.isalpha())
    return f"x {token[:-1]}", token[-1] + " y"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"labels": [" Yes"]}, "labels", "own tokens"),
        ({"label_token_ids": [5]}, "label_token_ids", "own tokens"),
        ({"apply_softmax": True}, "apply_softmax", "own tokens"),
        ({"item_first": True}, "item_first", "own tokens"),
        ({"items": [" red", ""]}, "items[1]", "empty"),
        ({"query": [1], "items": [[2], []]}, "items[1]", "empty"),
        ({"query": ""}, "query", "at least one token"),
        ({"query": [], "items": [[2], []]}, "query", "at least one token"),
        ({"query": seam()[0], "items": [" red", seam()[1]]}, "items[1]", "joins"),
        ({"query": [1], "items": ["red"]}, "items[0]", "another kind"),
        ({"query": [1], "items": [[10**6]]}, "items[0][0]", "not a token"),
        ({"items": [" red" * 5000]}, "items[0]", "context"),
        ({"readout": "entropy"}, "readout", "readout"),
        ({"query": None, "items": None, "text_1": "a", "text_2": "b"}, "readout", "`query` and `items`"),
        ({"readout": None, "labels": [" Yes"], "return_token_logprobs": True}, "return_token_logprobs", "likelihood"),
    ],
)
def test_what_is_refused(shared: httpx.Client, body: dict[str, Any], param: str, says: str) -> None:
    check_refused(shared.post("/v1/score", json={"query": QUERY, "items": ITEMS, "readout": "likelihood"} | body), param, says)


def test_partial_results_name_each_item_without_a_likelihood(shared: httpx.Client) -> None:
    query, item = seam()
    items = [" red", " red" * 5000, item, "", " blue"]
    answer = ask(shared, query=query, items=items, partial_results=True)
    assert [found["index"] for found in answer["data"]] == [0, 4]
    assert [error["index"] for error in answer["errors"]] == [1, 2, 3]
    assert answer["data"][1]["logprob"] == ask(shared, query=query, items=[" blue"])["data"][0]["logprob"]


def test_a_stream_of_likelihoods_is_the_answer_in_pieces(shared: httpx.Client) -> None:
    whole = ask(shared, return_token_logprobs=True)
    body = {"query": QUERY, "items": ITEMS, "readout": "likelihood", "stream": True, "return_token_logprobs": True}
    *data, closing = events(shared.post("/v1/score", json=body))
    assert {event["object"] for event in data} == {"likelihood.chunk"}
    assert sorted((item for event in data for item in event["data"]), key=lambda item: item["index"]) == whole["data"]
    assert closing["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert closing["data"] == []


def test_a_probability_of_zero_is_a_number(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.logprobs_after", lambda _, size: [float("-inf")] * size)
    (found,) = ask(client, items=[" red"], return_token_logprobs=True)["data"]
    assert set(found["token_logprobs"]) == {-9999.0}
    assert found["logprob"] == -9999.0 * found["tokens"]
