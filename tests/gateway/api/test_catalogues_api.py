"""``/v1/catalogues``, and scores of registered items: a gateway before a fake engine, with catalogues in memory and in Redis."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from redis.exceptions import ResponseError

from tests.fakes import FakeEngine, ids, logprobs_after
from tests.gateway.answers import events
from tests.gateway.conftest import gateways, metric
from tests.processes import wait_until
from tests.redis import RedisServer
from yardstick_llm.gateway.requests.catalogue import MAX_ID
from yardstick_llm.gateway.schemas.common import MAX_ITEMS

TEXTS = ["Red running shoes", "Oak table", "", "brown fox", "d", " jumps\nover", "lazy dog ", "été 👟"]
QUERY = " Is it relevant? Answer:"
names = (f"shoes-{number}" for number in count())


@pytest.fixture(scope="module", params=["memory", "redis"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = FakeEngine()
    with gateways() as start:
        if request.param == "memory":
            yield engine, start(engine)
            return
        with RedisServer.start() as redis:
            client = start(engine, redis_url=redis.url, redis_seconds=5)
            yield engine, client


@pytest.fixture
def name(client: httpx.Client) -> str:
    name = next(names)
    create(client, name).raise_for_status()
    return name


def create(client: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return client.put(f"/v1/catalogues/{name}", json=body)


def register(client: httpx.Client, name: str, items: dict[str, str]) -> dict[str, Any]:
    body = [{"id": id, "text": text} for id, text in items.items()]
    return client.put(f"/v1/catalogues/{name}/items", json=body).raise_for_status().json()


def score(client: httpx.Client, name: str, named: list[str] | None, query: Any = QUERY, **body: Any) -> httpx.Response:
    body = {"query": query, "catalogue": name, "labels": [" Yes", " No"]} | ({} if named is None else {"ids": named}) | body
    return client.post("/v1/score", json=body)


def expected(prompt: list[int]) -> list[float]:
    logprobs = logprobs_after(prompt, FakeEngine().vocab_size)
    return [math.exp(logprobs[label]) for text in (" Yes", " No") for label in ids(text)]


@pytest.mark.parametrize("template", ["{item}{query}", "Item: {item}\nQuery:{query} ?", ["<|im_start|>{item}", "asked: {query}"]])
@pytest.mark.parametrize("query", [QUERY, "er", "s Yes", "\nor not", ids(QUERY)], ids=["text", "short", "joins", "newline", "ids"])
def test_scores_are_those_of_the_joined_text(client: httpx.Client, template: Any, query: Any) -> None:
    name = next(names)
    create(client, name, template=template).raise_for_status()
    register(client, name, {f"i{place}": text for place, text in enumerate(TEXTS)})
    order = [f"i{place}" for place in (3, 1, 0, 2, 4, 7, 6, 5, 1)]
    answer = score(client, name, order, query).raise_for_status().json()
    assert answer["ids"] == order
    for id, got in zip(order, answer["scores"], strict=True):
        text = TEXTS[int(id[1:])]
        if isinstance(template, list):
            after = query if isinstance(query, list) else None
            middle = ids("asked: ") + after if after else ids(f"asked: {query}")
            prompt = [*ids("<|im_start|>"), *ids(text), *middle]
        elif isinstance(query, list):
            before, _, behind = template.partition("{query}")
            prompt = ids(before.replace("{item}", text)) + query + ids(behind)
        else:
            prompt = ids(template.replace("{item}", text).replace("{query}", query))
        assert got == pytest.approx(expected(prompt)), (text, query)  # Redis keeps float32


@pytest.mark.parametrize("template", ["{item}{query}", "Item: {item}\nQuery:{query} ?", ["<|im_start|>{item}", "asked: {query}"]])
def test_a_registration_is_charged_the_texts_around_items_and_their_tails(client: httpx.Client, template: Any) -> None:
    name = next(names)
    create(client, name, template=template).raise_for_status()
    told = register(client, name, {f"i{place}": text for place, text in enumerate(TEXTS)})
    if isinstance(template, list):
        expected = sum(len(ids(text)) + 1 for text in TEXTS)
    else:
        expected = sum(len(ids(template.partition("{query}")[0].replace("{item}", text))) for text in TEXTS)
    assert told["usage"]["prompt_tokens"] == expected


def test_texts_around_items_count_towards_the_characters_of_a_registration() -> None:
    with gateways() as start:
        client = start(FakeEngine(), max_request_characters=5000)
        create(client, "long", template="red " * 100 + "{item}{query}").raise_for_status()
        for item in ({"text": "a"}, {"token_ids": [5]}):
            body = [{"id": f"i{place}"} | item for place in range(12)]
            assert client.put("/v1/catalogues/long/items", json=body).status_code == 200
            refused = client.put("/v1/catalogues/long/items", json=[{"id": f"i{place}"} | item for place in range(13)])
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")


def test_queries_that_differ_where_they_join_an_item_share_no_result(client: httpx.Client, name: str) -> None:
    texts = ["red sho", "blue ta", "over th", "jum"]
    register(client, name, {f"i{place}": text for place, text in enumerate(texts)})
    for head in ("es", "ble", "e", "ps", "x", "es"):
        query = f"{head} red fox"
        scores = score(client, name, [f"i{place}" for place in range(len(texts))], query).raise_for_status().json()["scores"]
        assert scores == [pytest.approx(expected(ids(text + query))) for text in texts], head


def test_items_are_replaced_and_removed(client: httpx.Client, name: str) -> None:
    answer = register(client, name, {"a": "one", "b": "two"})
    assert (answer["added"], answer["changed"], answer["unchanged"]) == (2, 0, 0)
    first = score(client, name, ["a", "b"]).json()["scores"]
    again = register(client, name, {"a": "three", "b": "two", "c": "new"})
    assert (again["added"], again["changed"], again["unchanged"]) == (1, 1, 1)
    second = score(client, name, ["a", "b", "c"]).json()["scores"]
    assert second[0] == pytest.approx(expected(ids("three" + QUERY)))
    assert second[1] == pytest.approx(first[1])
    state = client.get(f"/v1/catalogues/{name}").raise_for_status().json()
    assert (state["items"], state["model"]) == (3, "fake")
    assert client.delete(f"/v1/catalogues/{name}/items", params={"id": ["a", "nobody"]}).json()["deleted"] == 1
    refused = score(client, name, ["b", "a"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "item_not_found")
    assert refused.json()["error"]["param"] == "ids[1]"
    assert "'a'" in refused.json()["error"]["message"]
    after = client.get(f"/v1/catalogues/{name}").json()
    assert after["items"] == 2
    assert after["bytes"] < state["bytes"]
    assert after["version"] != state["version"]
    assert client.delete(f"/v1/catalogues/{name}").json() == {"id": name, "object": "catalogue.deleted", "deleted": True}
    assert score(client, name, ["b"]).json()["error"]["code"] == "catalogue_not_found"
    create(client, name).raise_for_status()
    assert score(client, name, ["b"]).json()["error"]["code"] == "item_not_found", "a new catalogue has no old items"


def test_json_lines_and_token_ids(client: httpx.Client, name: str) -> None:
    lines = [{"id": "x", "text": "red\nshoes"}, {"id": "y", "token_ids": ids("blue table")}, {"id": "x", "text": "red fox"}]
    body = "\n".join(map(json.dumps, lines)) + "\n\n"
    answer = client.put(f"/v1/catalogues/{name}/items", content=body).raise_for_status().json()
    assert answer["added"] == 2
    scores = score(client, name, ["x", "y"]).json()["scores"]
    assert scores == [pytest.approx(expected(ids(f"{text}{QUERY}"))) for text in ("red fox", "blue table")]
    page = client.get(f"/v1/catalogues/{name}/items", params={"limit": 1}).json()
    rest = client.get(f"/v1/catalogues/{name}/items", params={"after": page["next"]}).json()
    assert [item["id"] for item in page["data"] + rest["data"]] == ["x", "y"]
    assert rest["next"] is None


def test_labels_and_ranks(client: httpx.Client, engine: FakeEngine) -> None:
    name = next(names)
    create(client, name, labels=[" Yes", " No"], template="{item}\nQ: {query}").raise_for_status()
    register(client, name, {f"i{place}": text for place, text in enumerate(TEXTS)})
    everything = [f"i{place}" for place in range(len(TEXTS))]
    scores = score(client, name, everything, labels=None).raise_for_status().json()["scores"]
    relevance = {id: yes / (yes + no) for id, (yes, no) in zip(everything, scores, strict=True)}
    order = sorted(everything, key=lambda id: -relevance[id])
    body = {"query": QUERY, "catalogue": name}
    for extra in ({"ids": everything}, {"top_n": 100}, {"top_n": 3}, {"ids": everything, "top_n": 2}):
        results = client.post("/v1/rerank", json=body | extra).raise_for_status().json()["results"]
        assert [result["id"] for result in results] == order[: extra.get("top_n")]
        assert [result["relevance_score"] for result in results] == pytest.approx([relevance[result["id"]] for result in results])
    best = score(client, name, everything, top_n=3, apply_softmax=True).raise_for_status().json()
    assert engine.item_scores[-1].readout.raw, "the sum over the vocabulary cancels, so it is not computed"
    assert best["ids"] == order[:3]
    assert [row[0] for row in best["scores"]] == pytest.approx([relevance[id] for id in order[:3]])
    wait_until(lambda: score(client, name, everything).headers["x-yardstick-cache"] == "8/8")
    whole = score(client, name, None, top_n=3, apply_softmax=True).raise_for_status()
    assert whole.json()["ids"] == best["ids"]
    assert [row[0] for row in whole.json()["scores"]] == pytest.approx([row[0] for row in best["scores"]])
    assert whole.headers["x-yardstick-cache"] == "8/8"
    assert whole.json()["usage"]["prompt_tokens"] == sum(len(ids(f"{text}\nQ: {QUERY}")) for text in TEXTS)
    streamed = events(score(client, name, None, stream=True, apply_softmax=True))
    got = {row["id"]: row["scores"][0] for event in streamed if event["object"] == "scoring.chunk" for row in event["data"]}
    assert got == pytest.approx(relevance)
    *_, last = events(score(client, name, None, stream=True, top_n=2, apply_softmax=True))
    assert last["ids"] == order[:2]
    *_, last = events(score(client, name, everything, stream=True, top_n=2, apply_softmax=True))
    assert last["ids"] == order[:2]
    assert [row[0] for row in last["scores"]] == pytest.approx([relevance[id] for id in order[:2]])
    *some, last = events(client.post("/v1/rerank", json=body | {"stream": True, "top_n": 2}))
    assert [result["id"] for result in last["results"]] == order[:2]
    assert {result["id"] for event in some for result in event["results"]} == set(order[:2])


ERRORS: dict[str, tuple[str, str, Any, int, str | None]] = {
    "a bad name": ("PUT", "/v1/catalogues/.hidden", {}, 400, "name"),
    "no item": ("PUT", "/v1/catalogues/new", {"template": "{query}"}, 400, "template"),
    "the query first": ("PUT", "/v1/catalogues/new", {"template": "{query}{item}"}, 400, "template"),
    "two items": ("PUT", "/v1/catalogues/new", {"template": "{item}{item}{query}"}, 400, "template"),
    "a long label": ("PUT", "/v1/catalogues/new", {"labels": ["not one token"]}, 400, "labels[0]"),
    "an unknown model": ("PUT", "/v1/catalogues/new", {"model": "nobody"}, 404, "model"),
    "an unknown catalogue": ("PUT", "/v1/catalogues/nobody/items", [{"id": "a", "text": "b"}], 404, "catalogue"),
    "no items": ("PUT", "/v1/catalogues/NAME/items", [], 400, "items"),
    "a giant id": ("PUT", "/v1/catalogues/NAME/items", [{"id": "a" * 129, "text": "b"}], 400, "items[0].id"),
    "text and ids": ("PUT", "/v1/catalogues/NAME/items", [{"id": "a", "text": "b", "token_ids": [1]}], 400, "items[0]"),
    "another field": ("PUT", "/v1/catalogues/NAME/items", [{"id": "a", "text": "b", "c": 1}], 400, "items[0].c"),
    "an unknown token": ("PUT", "/v1/catalogues/NAME/items", [{"id": "a", "token_ids": [10**6]}], 400, "items[0].token_ids[0]"),
    "a huge item": (
        "PUT",
        "/v1/catalogues/NAME/items",
        [{"id": "a", "text": "b"}, {"id": "h", "text": "fox " * 9000}],
        400,
        "items[1]",
    ),
    "too many": ("PUT", "/v1/catalogues/NAME/items", [{"id": f"i{each}", "text": "b"} for each in range(2001)], 400, "items"),
    "no JSON": ("PUT", "/v1/catalogues/NAME/items", "hello", 400, None),
    "an empty catalogue name": ("POST", "/v1/score", {"catalogue": "", "ids": ["a"]}, 404, "catalogue"),
    "no ids": ("POST", "/v1/score", {"catalogue": "NAME"}, 400, "ids"),
    "too many ids": ("POST", "/v1/score", {"catalogue": "NAME", "ids": ["a"] * 10_001}, 400, "ids"),
    "items too": ("POST", "/v1/score", {"catalogue": "NAME", "ids": ["known"], "items": ["a"]}, 400, "items"),
    "no labels": ("POST", "/v1/score", {"catalogue": "NAME", "ids": ["known"], "labels": None}, 400, "labels"),
    "likelihoods": ("POST", "/v1/score", {"catalogue": "NAME", "ids": ["known"], "readout": "likelihood"}, 400, "readout"),
    "ids alone": ("POST", "/v1/score", {"items": ["a"], "ids": ["known"]}, 400, "ids"),
    "another model": ("POST", "/v1/score", {"catalogue": "NAME", "ids": ["known"], "model": "nobody"}, 404, "model"),
    "ranks without labels": ("POST", "/v1/rerank", {"catalogue": "NAME", "ids": ["known"]}, 400, "labels"),
    "a bad limit": ("GET", "/v1/catalogues/NAME/items?limit=0", None, 400, "limit"),
    "a bad page": ("GET", "/v1/catalogues/NAME/items?after=x", None, 400, "after"),
    "no id to delete": ("DELETE", "/v1/catalogues/NAME/items", None, 400, "id"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_field(client: httpx.Client, shared_name: str, case: str) -> None:
    method, path, body, status, param = ERRORS[case]
    path = path.replace("NAME", shared_name)
    if isinstance(body, dict):
        body = {key: shared_name if value == "NAME" else value for key, value in body.items()}
        if path == "/v1/score":
            body = {"query": QUERY, "labels": [" Yes"]} | body
        elif path == "/v1/rerank":
            body = {"query": QUERY} | body
    content = body if isinstance(body, str) else None if body is None else json.dumps(body)
    answer = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.fixture(scope="module")
def shared_name(pair: tuple[FakeEngine, httpx.Client]) -> str:
    name = next(names)
    create(pair[1], name).raise_for_status()
    register(pair[1], name, {"known": "text"})
    return name


def test_a_catalogue_keeps_its_form(client: httpx.Client, name: str) -> None:
    assert create(client, name).status_code == 200
    refused = create(client, name, template="{item} {query}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert name in [each["id"] for each in client.get("/v1/catalogues").json()["data"]]


@pytest.mark.parametrize("path", ["score", "rerank"])
def test_the_most_items_with_the_longest_ids(client: httpx.Client, name: str, path: str) -> None:
    most = [f"{place:05d}-{'x' * (MAX_ID - 6)}" for place in range(MAX_ITEMS)]
    answer = client.post(f"/v1/{path}", json={"query": QUERY, "catalogue": name, "ids": most})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "item_not_found", "ids[0]")


def test_without_redis_a_request_is_answered_503() -> None:
    engine = FakeEngine()
    with gateways() as start, RedisServer.start() as redis:
        client = start(engine, redis_url=redis.url, redis_seconds=1)
        create(client, "shop").raise_for_status()
        register(client, "shop", {"a": "one"})
        score(client, "shop", ["a"]).raise_for_status()
        redis.kill()
        for answer in (score(client, "shop", ["a"]), client.put("/v1/catalogues/shop/items", json=[{"id": "b", "text": "c"}])):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert answer.headers["retry-after"] == "1"
        plain = {"query": "a", "items": ["b"], "label_token_ids": [5]}
        assert client.post("/v1/score", json=plain).status_code == 200, "other requests need no Redis"


def test_a_redis_that_cannot_save_is_read() -> None:
    """It refuses all writes, and even PING, until its disk has room."""
    with gateways() as start, RedisServer.start("--save", "3600 1000") as redis:
        client = start(FakeEngine(), redis_url=redis.url, redis_seconds=5)
        create(client, "shop").raise_for_status()
        register(client, "shop", {f"i{place}": text for place, text in enumerate(TEXTS)})
        close = [pytest.approx(row, rel=1e-5) for row in score(client, "shop", ["i0", "i1"]).raise_for_status().json()["scores"]]
        with redis.client() as plain:
            redis.lose_directory()
            plain.bgsave()
            wait_until(lambda: plain.info("persistence")["rdb_last_bgsave_status"] == "err")
            with pytest.raises(ResponseError, match="MISCONF"):
                plain.ping()
            register_new = {"json": [{"id": "new", "text": "red"}]}
            for answer in (
                client.put("/v1/catalogues/shop/items", **register_new),
                create(client, "other"),
                client.delete("/v1/catalogues/shop"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
                assert answer.headers["retry-after"] == "1"
                assert score(client, "shop", ["i0", "i1"]).raise_for_status().json()["scores"] == close
            assert client.get("/v1/catalogues/shop").json()["items"] == len(TEXTS)
            assert score(client, "shop", ["i2"]).status_code == 200
            assert metric(client, "yardstick_redis_available") == 1
            assert metric(client, 'yardstick_redis_errors_total{kind="disk"}') >= 3
            late = start(FakeEngine(), redis_url=redis.url, redis_seconds=5)
            assert score(late, "shop", ["i0", "i1"]).raise_for_status().json()["scores"] == close
            plain.config_set("save", "")
        client.put("/v1/catalogues/shop/items", **register_new).raise_for_status()
        assert client.get("/v1/catalogues/shop").json()["items"] == len(TEXTS) + 1


def test_a_redis_without_memory_is_read_and_emptied() -> None:
    """Registrations are refused, and nothing else is lost: not the scores of registered items, and not the ways to make room."""
    with gateways() as start, RedisServer.start() as redis:
        client = start(FakeEngine(), redis_url=redis.url, redis_seconds=5)
        for name in ("full", "other"):
            create(client, name).raise_for_status()
            register(client, name, {f"i{place}": text for place, text in enumerate(TEXTS)})
        with redis.client() as plain:
            plain.config_set("maxmemory", 1)
        refused = client.put("/v1/catalogues/full/items", json=[{"id": "new", "text": "red"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "store_full")
        assert "Redis has no memory" in refused.json()["error"]["message"]
        assert create(client, "third").status_code == 413
        assert score(client, "full", None, top_n=1).status_code == 200
        assert score(client, "full", ["i0", "i1"]).status_code == 200
        assert metric(client, "yardstick_redis_available") == 1
        wait_until(lambda: metric(client, 'yardstick_redis_errors_total{kind="full"}') >= 3)  # scores are cached in the background
        assert client.delete("/v1/catalogues/full/items?id=i0").raise_for_status().json()["deleted"] == 1
        assert client.delete("/v1/catalogues/other").status_code == 200
        assert [each["id"] for each in client.get("/v1/catalogues").json()["data"]] == ["full"]
        with redis.client() as plain:
            plain.config_set("maxmemory", 0)
        register(client, "full", {"new": "red"})
        state = client.get("/v1/catalogues/full").raise_for_status().json()
        assert state["items"] == len(TEXTS)
        assert score(client, "full", ["new"]).status_code == 200
        assert metric(client, "yardstick_catalogues") == 1
        assert metric(client, "yardstick_catalogue_items") == len(TEXTS)


def test_items_expire() -> None:
    with gateways() as start, RedisServer.start() as redis:
        memory, shared = start(FakeEngine()), start(FakeEngine(), redis_url=redis.url, redis_seconds=5)
        for client in (memory, shared):
            create(client, "shop", ttl_seconds=1.2).raise_for_status()
            register(client, "shop", {"a": "one", "b": "two"})
            assert score(client, "shop", ["a", "b"]).status_code == 200
            time.sleep(0.7)
            register(client, "shop", {"b": "two"})
            time.sleep(0.7)
            assert score(client, "shop", ["b"]).status_code == 200, "registered again"
            assert score(client, "shop", ["b", "a"]).json()["error"]["param"] == "ids[1]"
            assert [item["id"] for item in client.get("/v1/catalogues/shop/items").json()["data"]] == ["b"]
            assert score(client, "shop", None, top_n=9).json()["ids"] == ["b"]
            assert client.get("/v1/catalogues/shop").json()["items"] == 1


def test_a_request_reads_a_bounded_number_of_bytes(client: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.gateway.api.catalogues.MOST_READ", 1000)
    register(client, name, {f"i{place}": "the quick brown fox " * 5 for place in range(10)})
    assert score(client, name, ["i1"]).status_code == 200
    refused = score(client, name, [f"i{place}" for place in range(10)])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ids")
    assert "name fewer of them" in refused.json()["error"]["message"]
