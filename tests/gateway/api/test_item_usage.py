"""``return_item_usage`` of scores and reranking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways

RERANKER = """
name = "reranker"
task = "rerank"
template = ["find: {query}", "\\nin: {document}\\nRelevant:"]
labels = [" Yes", " No"]
"""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(model="scorer"), FakeEngine(model="reranker", fingerprint="reranker", preset=RERANKER))


def score(client: httpx.Client, items: list[list[int]], **fields: Any) -> httpx.Response:
    body = {"model": "scorer", "query": [1, 2, 3], "items": items, "label_token_ids": [5], "return_item_usage": True}
    return client.post("/v1/score", json=body | fields)


def test_reused_and_equal_items_cost_nothing(client: httpx.Client) -> None:
    first = score(client, [[4], [4, 5], [4]]).json()["item_usage"]
    assert first == {"index": [0, 1, 2], "prompt_tokens": [4, 5, 4], "computed_tokens": [1, 2, 0], "reused": [False] * 3}
    told = score(client, [[6, 7], [4, 5]]).json()
    assert told["item_usage"] == {"index": [0, 1], "prompt_tokens": [5, 5], "computed_tokens": [2, 0], "reused": [False, True]}
    assert sum(told["item_usage"]["prompt_tokens"]) == told["usage"]["prompt_tokens"]


def test_a_stream_has_it_at_its_end(client: httpx.Client) -> None:
    events = [line[6:] for line in score(client, [[8], [9]], stream=True).text.splitlines() if line.startswith("data: {")]
    *chunks, last = map(json.loads, events)
    assert all("item_usage" not in chunk for chunk in chunks)
    assert last["item_usage"]["computed_tokens"] == [1, 1]


def test_items_without_a_result_are_left_out(client: httpx.Client) -> None:
    told = score(client, [[4], [9] * 5000, [7]], partial_results=True).json()
    assert [error["index"] for error in told["errors"]] == [1]
    assert told["item_usage"]["index"] == [0, 2]


def test_reranking_has_it_and_its_bare_list_has_not(client: httpx.Client) -> None:
    body = {"model": "reranker", "query": "shoes", "return_item_usage": True}
    usage = client.post("/v1/rerank", json=body | {"documents": ["blue", "a longer one"]}).json()["item_usage"]
    assert usage["index"] == [0, 1]
    assert 0 < usage["computed_tokens"][0] < usage["prompt_tokens"][0] < usage["prompt_tokens"][1]
    refused = client.post("/v1/rerank", json=body | {"texts": ["blue"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts")
