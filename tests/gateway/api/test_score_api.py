"""``/v1/score`` before fake engines: the right numbers, computed once."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fakes import LIMITS, FakeEngine, Faults, ids, library, logprobs_after
from tests.gateway.answers import check_refused, events
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until

YES, NO = ids(" Yes")[0], ids(" No")[0]
QUERY = "Is it relevant? "


def expected(engine: FakeEngine, prompts: list[list[int]], labels: list[int]) -> list[Any]:
    rows = [logprobs_after(prompt, engine.vocab_size) for prompt in prompts]
    return [pytest.approx([math.exp(row[label]) for label in labels]) for row in rows]


def score(client: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    if "labels" not in body:
        body = {"label_token_ids": [YES, NO]} | body
    answer = client.post("/v1/score", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_scores_are_probabilities_over_the_vocabulary(client: httpx.Client, engine: FakeEngine) -> None:
    items = ["red shoes", "blue table", "the lazy dog"]
    answer = score(client, query=QUERY, items=items, labels=[" Yes", " No"], model="fake").json()
    prompts = [ids(QUERY + item) for item in items]
    assert answer["scores"] == expected(engine, prompts, [YES, NO])
    assert answer["object"] == "scoring"
    assert answer["model"] == "fake"
    assert answer["id"].startswith("score-")
    tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0}}
    (request,) = engine.scores
    assert request.prefix == ids(QUERY)[: len(request.prefix)] != []


def test_softmax_is_over_the_labels(client: httpx.Client, engine: FakeEngine) -> None:
    (row,) = score(client, query=QUERY, items=["red shoes"], apply_softmax=True).json()["scores"]
    logprobs = logprobs_after(ids(QUERY + "red shoes"), engine.vocab_size)
    assert sum(row) == pytest.approx(1)
    assert row[0] / row[1] == pytest.approx(math.exp(logprobs[YES] - logprobs[NO]))


@pytest.mark.parametrize("item_first", [False, True])
def test_prompts_are_tokenised_whole(client: httpx.Client, engine: FakeEngine, item_first: bool) -> None:
    pairs = ["row", "d fox", "ogs"]
    query = "the b" if not item_first else "n table"
    joined = [item + query if item_first else query + item for item in pairs]
    assert any(
        ids(text) != ids(query) + ids(item) and ids(text) != ids(item) + ids(query)
        for text, item in zip(joined, pairs, strict=True)
    )
    answer = score(client, query=query, items=pairs, item_first=item_first).json()
    assert answer["scores"] == expected(engine, [ids(text) for text in joined], [YES, NO])


@pytest.mark.parametrize("item_first", [False, True])
def test_token_ids_are_taken_as_they_are(client: httpx.Client, engine: FakeEngine, item_first: bool) -> None:
    query, items = [5, 6, 7], [[8], [9, 10], []]
    answer = score(client, query=query, items=items, item_first=item_first).json()
    prompts = [item + query if item_first else query + item for item in items]
    assert answer["scores"] == expected(engine, prompts, [YES, NO])


def test_no_items_need_no_engine(client: httpx.Client, engine: FakeEngine) -> None:
    assert score(client, query=QUERY, items=[]).json()["scores"] == []
    assert engine.scores == []


def test_large_requests_are_cut_and_merged_in_order(client: httpx.Client, engine: FakeEngine) -> None:
    items = [[place % 250, place // 250] for place in range(2000)]
    answer = score(client, query=[1, 2], items=items).json()
    assert len(answer["scores"]) == 2000
    for place in (0, 1, 999, 1999):
        assert answer["scores"][place] == expected(engine, [[1, 2, *items[place]]], [YES, NO])[0]
    sizes = [len(request.branches) for request in engine.scores]
    assert sum(sizes) == 2000
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == math.ceil(2000 / LIMITS.max_branches)


def test_identical_items_are_computed_once(client: httpx.Client, engine: FakeEngine) -> None:
    answer = score(client, query="Once? ", items=["a", "b", "a", "a"])
    assert [len(request.branches) for request in engine.scores] == [2]
    scores = answer.json()["scores"]
    assert scores[0] == scores[2] == scores[3] != scores[1]
    assert answer.headers["x-yardstick-cache"] == "0/4"


def test_results_are_cached_however_the_prompt_is_split(client: httpx.Client, engine: FakeEngine) -> None:
    first = score(client, query=[11, 12, 13], items=[[4], [5]])
    second = score(client, query=[11, 12], items=[[13, 5], [13, 4], [9]])
    assert second.headers["x-yardstick-cache"] == "2/3"
    assert second.json()["scores"][:2] == first.json()["scores"][::-1]
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert [request.branches for request in engine.scores] == [[[4], [5]], [[9]]]


@pytest.mark.parametrize(
    ("header", "asked", "kept"), [("no-cache", True, True), ("no-store", True, False), ("max-age=0", False, True)]
)
def test_cache_control_is_honoured(client: httpx.Client, engine: FakeEngine, header: str, asked: bool, kept: bool) -> None:
    query = [*header.encode()]
    score(client, query=query, items=[[2]])
    score(client, {"cache-control": header}, query=query, items=[[2]])
    assert len(engine.scores) == 1 + asked
    score(client, {"cache-control": header}, query=query, items=[[3]])
    assert score(client, query=query, items=[[3]]).headers["x-yardstick-cache"] == f"{int(kept)}/1"


def test_the_cache_can_be_off(start: Start) -> None:
    engine = FakeEngine()
    client = start(engine, cache_bytes=0)
    for _ in range(2):
        assert score(client, query=[1], items=[[2]]).headers["x-yardstick-cache"] == "0/1"


def test_requests_in_flight_share_results(client: httpx.Client, engine: FakeEngine) -> None:
    engine.faults.delay = 0.5
    with ThreadPoolExecutor(4) as threads:
        bodies = [{"query": [31], "items": [[2], [3]]}, {"query": [31], "items": [[3], [2], [4]]}] * 2
        answers = list(threads.map(lambda body: score(client, **body), bodies))
    asked = [branch for request in engine.scores for branch in request.branches]
    assert sorted(asked) == [[2], [3], [4]]
    for answer, body in zip(answers, bodies, strict=True):
        assert answer.json()["scores"] == expected(engine, [[31, *item] for item in body["items"]], [YES, NO])


@pytest.mark.parametrize("stream", [False, True])
def test_who_waited_for_a_client_that_left_still_gets_its_scores(client: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.faults.delay = 1.0
    query = 41 + stream
    body = {"query": [query], "items": [[2]], "label_token_ids": [YES]}
    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(httpx.post, f"{client.base_url}/v1/score", json=body | {"stream": stream}, timeout=0.3)
        wait_until(lambda: len(engine.scores) == 1)
        staying = threads.submit(score, client, **body)
        assert isinstance(leaving.exception(), httpx.ReadTimeout)
        assert staying.result().json()["scores"] == expected(engine, [[query, 2]], [YES])
    assert len(engine.left) == 1


def test_labels_beyond_the_true_vocabulary_are_refused(client: httpx.Client, engine: FakeEngine) -> None:
    last = library().get_vocab_size() - 1
    score(client, query=[1], items=[[2]], label_token_ids=[last])
    answer = client.post("/v1/score", json={"query": [1], "items": [[2]], "label_token_ids": [last, last + 1]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "label_token_ids[1]"
    assert last + 1 < engine.vocab_size


def test_a_label_of_several_tokens_shows_them(client: httpx.Client) -> None:
    error = client.post("/v1/score", json={"query": "a", "items": ["b"], "labels": [" Yes", "zebra"]}).json()["error"]
    assert error["param"] == "labels[1]"
    for token in ids("zebra"):
        assert f"({token})" in error["message"]


def test_a_prompt_longer_than_the_context_names_its_item(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"query": [1] * 2000, "items": [[2] * 48, [2] * 49], "label_token_ids": [YES]}
    answer = client.post("/v1/score", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("items[1]", "context_length_exceeded")
    assert engine.scores == []
    assert score(client, **{**body, "items": body["items"][:1]})


def test_several_models_are_told_apart(start: Start) -> None:
    small, large = FakeEngine(model="small"), FakeEngine(model="org/large", fingerprint="fake-2")
    client = start(small, large)
    score(client, model="org/large", query=[1], items=[[2]])
    assert (len(small.scores), len(large.scores)) == (0, 1)
    assert client.get("/v1/models/org/large").json()["id"] == "org/large"
    unnamed = client.post("/v1/score", json={"query": [1], "items": [[2]], "label_token_ids": [1]})
    assert unnamed.status_code == 400
    assert unnamed.json()["error"]["param"] == "model"


def test_streams_and_partial_results(shared: httpx.Client) -> None:
    body = {"query": "The fox", "items": [" one", " two" * 3000, " three"], "labels": [" Yes", " No"], "partial_results": True}
    answer = shared.post("/v1/score", json=body).raise_for_status().json()
    assert [row is None for row in answer["scores"]] == [False, True, False]
    assert [(error["index"], error["code"]) for error in answer["errors"]] == [(1, "context_length_exceeded")]
    alone = shared.post("/v1/score", json=body | {"items": [" one", " three"], "partial_results": False}).json()["scores"]
    assert [row for row in answer["scores"] if row] == alone
    *chunks, last = events(shared.post("/v1/score", json=body | {"stream": True}))
    assert {item["index"]: item["scores"] for chunk in chunks for item in chunk["data"]} == {0: alone[0], 2: alone[1]}
    assert [error["index"] for error in last["errors"]] == [1]
    ids_only = {"query": [1, 2], "items": [[3], [4] * 3000], "label_token_ids": [5], "partial_results": True}
    assert [row is None for row in shared.post("/v1/score", json=ids_only).json()["scores"]] == [False, True]


def test_a_query_that_leaves_no_room_fails_partial_results(shared: httpx.Client) -> None:
    for query, item in (("fox " * 5000, "a"), ([1] * 5000, [2])):
        body = {"query": query, "items": [item], "label_token_ids": [5], "partial_results": True}
        check_refused(shared.post("/v1/score", json=body), "query")


def test_a_prompt_whose_numbers_overflow_fails_alone(start: Start) -> None:
    """Neither the other items nor the engines pay for it, however often it comes."""
    engines = [FakeEngine(faults=Faults(overflow=7)) for _ in range(2)]
    client = start(*engines, hedge_budget=0)  # which computes late ones twice, such as those of a busy machine
    body = {"query": [1, 2], "items": [[3], [7], [4, 5]], "label_token_ids": [5]}
    for attempt in range(10):
        answer = client.post("/v1/score", json=body | {"query": [1, attempt]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_a_number")
        assert answer.headers["x-should-retry"] == "false"
        alone = client.post("/v1/score", json=body | {"query": [1, attempt], "items": [[7]]})
        assert alone.status_code == 500
    assert sum(len(engine.scores) for engine in engines) <= 30, "nothing is sent to another engine"
    told = client.post("/v1/score", json=body | {"partial_results": True}).json()
    assert [item is None for item in told["scores"]] == [False, True, False]
    assert told["errors"][0]["index"] == 1
    assert told["errors"][0]["code"] == "not_a_number"
    assert client.post("/v1/score", json=body | {"items": [[3], [4]]}).status_code == 200
    answer = client.post("/v1/completions", json={"prompt": [1, 7], "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_a_number")
    assert client.post("/v1/completions", json={"prompt": [1, 8], "max_tokens": 4}).status_code == 200
    assert sum(len(engine.generates) for engine in engines) == 2
    assert metric(client, "yardstick_engine_ejections_total") == 0


@pytest.mark.parametrize("path", ["score", "completions"])
def test_an_engine_that_computes_no_numbers_is_ejected(start: Start, path: str) -> None:
    broken, whole = FakeEngine(faults=Faults(overflow=3)), FakeEngine()
    client = start(broken, whole)
    statuses = []
    for attempt in range(40):
        body: dict[str, Any] = {"query": [1, attempt], "items": [[3], [3, 4]], "label_token_ids": [5]}
        body = body if path == "score" else {"prompt": [attempt, 3], "max_tokens": 2}
        statuses.append(client.post(f"/v1/{path}", json=body).status_code)
    assert set(statuses[-10:]) == {200}
    assert metric(client, 'yardstick_engine_ejections_total{model="fake"}') > 0
