"""Scores and ranks of items with images: prompts, results, caches and routes depend on the images, and on nothing else of them."""

from __future__ import annotations

import base64
import math
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids, logprobs_after, vision_fields, with_vision
from tests.gateway.answers import check_refused
from tests.gateway.conftest import Start
from tests.gateway.images.test_chat_images import refused, text
from tests.pictures import image_part, picture, seen
from yardstick_llm.engine import wire
from yardstick_llm.gateway.images.decode import decode, prepare

PRESET = """
name = "pictures"
task = "rerank"
template = ["<|im_start|>{query}", " {document}<|im_end|>"]
labels = [" Yes", " No"]
"""
LABELS = {"labels": [" Yes", " No"]}


ENGINE = vision_fields(preset=PRESET)


def post(client: httpx.Client, path: str = "/v1/score", **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def prompt(engine: FakeEngine, *parts: str | tuple[int, int, int]) -> list[int]:
    """The prompt of texts and pictures (seed, width, height), as the fake model sees it."""
    tokens: list[int] = []
    vision = engine.vision
    for part in parts:
        if isinstance(part, str):
            tokens += ids(part)
            continue
        image = prepare(decode(picture(*part), max_pixels=1 << 24), vision)
        whole = wire.Generate("x", [wire.IMAGE_TOKENS] * vision.tokens_of(image), wire.Sampling(max_tokens=1), images=[image])
        tokens += [vision.image_token - 2, *seen(vision, whole).prompt, vision.image_token - 1]
    return tokens


def expected(engine: FakeEngine, tokens: list[int]) -> list[float]:
    row = logprobs_after(tokens, engine.vocab_size)
    return [math.exp(row[ids(label)[0]]) for label in (" Yes", " No")]


def check(engine: FakeEngine, scores: list[list[float]], *prompts: list[int]) -> None:
    for row, tokens in zip(scores, prompts, strict=True):
        assert row == pytest.approx(expected(engine, tokens), rel=1e-6)


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_those_of_the_prompt_with_images(engine: FakeEngine, client: httpx.Client, item_first: bool) -> None:
    query = [text("Is it"), image_part(9), text(" red?")]
    items = ["a shoe", [image_part(1), text(" a")], {"content": [text("b"), image_part(2, 112, 56)]}, [image_part(1), text(" b")]]
    told = post(client, query=query, items=items, item_first=item_first, **LABELS)
    asked = ["Is it", (9, 56, 56), " red?"]
    parts: list[list[Any]] = [["a shoe"], [(1, 56, 56), " a"], ["b", (2, 112, 56)], [(1, 56, 56), " b"]]
    prompts = []
    for part in parts:
        whole = [*part, *asked] if item_first else [*asked, *part]
        joined: list[Any] = []
        for each in whole:
            both_text = joined and isinstance(each, str) and isinstance(joined[-1], str)
            joined[-1:] = [joined[-1] + each] if both_text else [*joined[-1:], each]
        prompts.append(prompt(engine, *joined))
    check(engine, told["scores"], *prompts)
    assert told["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_cached_scores_depend_on_the_pixels(engine: FakeEngine, client: httpx.Client) -> None:
    def hits(*items: Any, query: Any = "What?") -> str:
        answer = client.post("/v1/score", json={"query": query, "items": list(items), **LABELS})
        assert answer.status_code == 200, answer.text
        return answer.headers["x-yardstick-cache"]

    assert hits([image_part(21)], [image_part(22)]) == "0/2"
    assert hits([image_part(22)]) == "1/1"
    assert hits([image_part(23)], [image_part(21)], [image_part(22)]) == "2/3"
    assert hits([image_part(21, 112, 28)]) == "0/1"
    assert hits([text("x")], query=[image_part(21)]) == "0/1"
    assert hits([text("x")], query=[image_part(22)]) == "0/1"
    assert hits([text("x")], query=[image_part(21)]) == "1/1"
    assert hits([image_part(21), image_part(22)]) == "0/1"
    assert hits([image_part(22), image_part(21)]) == "0/1"


def test_images_of_one_request_travel_once(engine: FakeEngine, client: httpx.Client) -> None:
    items = [[image_part(31), text(str(number))] for number in range(4)] + ["plain"]
    post(client, query=[image_part(32), text("?")], items=items, **LABELS)
    (sent,) = engine.scores
    assert len(sent.images) == 2
    assert sum(id >= wire.IMAGE_TOKENS for id in sent.prefix) == 4
    assert [sum(id >= wire.IMAGE_TOKENS for id in branch) for branch in sent.branches] == [4, 4, 4, 4, 0]


def test_each_message_has_the_images_that_it_needs(start: Start) -> None:
    vision = with_vision().vision
    limited = wire.VisionInfo(14, 2, 56 * 56, 28 * 28 * 64, vision.image_token, max_images=3)
    engines = [with_vision(vision=limited) for _ in range(2)]
    client = start(*engines, split_tokens=1)
    items = [[text(f"item {number} "), image_part(number % 7)] for number in range(12)]
    told = post(client, query=[text("q"), image_part(50)], items=items, **LABELS)
    sent = [request for engine in engines for request in engine.scores]
    assert len(sent) >= 4
    assert all(len(request.images) <= 3 for request in sent)
    check(engines[0], told["scores"], *[prompt(engines[0], "q", (50, 56, 56), f"item {n} ", (n % 7, 56, 56)) for n in range(12)])
    first = post(client, query="?", items=items, item_first=True, **LABELS)
    check(engines[0], first["scores"], *[prompt(engines[0], f"item {n} ", (n % 7, 56, 56), "?") for n in range(12)])
    assert any(engine.item_scores for engine in engines)


def test_an_image_finds_its_replica_again(start: Start) -> None:
    engines = [with_vision() for _ in range(3)]
    client = start(*engines)
    query = [image_part(1), text("Which of these words describes this picture best?")]

    def chosen() -> int:
        before = [len(engine.scores) for engine in engines]
        post(client, query=query, items=[f"item {sum(before)}"], **LABELS)
        return next(place for place, engine in enumerate(engines) if len(engine.scores) > before[place])

    assert len({chosen() for _ in range(6)}) == 1
    places = set()
    for seed in range(12):
        query = [image_part(seed), text("Which of these words describes this picture best?")]
        places.add(chosen())
    assert len(places) > 1, "the digest is part of the affinity"


def test_documents_with_images_are_ranked(engine: FakeEngine, client: httpx.Client) -> None:
    raw = base64.b64encode(picture(3)).decode()
    documents = [
        "a",
        {"text": "b"},
        {"image": raw},
        {"content": [text("c"), image_part(4)]},
        {"image": f"data:image/png;base64,{raw}"},
    ]
    told = post(client, "/v1/rerank", query="red", documents=documents)
    by_index = {result["index"]: result["relevance_score"] for result in told["results"]}
    shown: list[tuple[Any, ...]] = [(" a",), (" b",), (" ", (3, 56, 56)), (" c", (4, 56, 56)), (" ", (3, 56, 56))]
    for index, parts in enumerate(shown):
        yes, no = expected(engine, prompt(engine, "<|im_start|>", "red", *parts, "<|im_end|>"))
        assert by_index[index] == pytest.approx(yes / (yes + no), rel=1e-5)
    with_image = post(client, "/v1/rerank", query={"image": raw}, documents=["a"])
    yes, no = expected(engine, prompt(engine, "<|im_start|>", (3, 56, 56), " a", "<|im_end|>"))
    assert with_image["results"][0]["relevance_score"] == pytest.approx(yes / (yes + no), rel=1e-5)


def test_pairs_may_have_images(engine: FakeEngine, client: httpx.Client) -> None:
    pictures = [{"content": [image_part(seed)]} for seed in (5, 6)]
    told = post(client, text_1=pictures, text_2=["a", {"content": [text("b"), image_part(7)]}])
    for entry, parts in zip(told["data"], [((5, 56, 56), " a"), ((6, 56, 56), " b", (7, 56, 56))], strict=True):
        yes, no = expected(engine, prompt(engine, "<|im_start|>", *parts, "<|im_end|>"))
        assert entry["score"] == pytest.approx(yes / (yes + no), rel=1e-5)
    told = post(client, text_1="a", text_2={"content": [image_part(5)]})
    assert len(told["data"]) == 1


def test_a_text_of_an_item_makes_no_image(engine: FakeEngine, client: httpx.Client) -> None:
    post(client, query="q", items=["<|image_pad|>", [text("<|image_pad|>"), image_part(1)]], **LABELS)
    (sent,) = engine.scores
    assert [sum(id >= wire.IMAGE_TOKENS for id in branch) for branch in sent.branches] == [0, 4]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"items": [[{"type": "image_url", "image_url": "data:image/png;base64,AA"}]]}, "items[0][0]", "not base64"),
        ({"items": ["a", {"image": "AAAA"}]}, "items[1].image", "is not a valid PNG"),
        ({"items": ["a", {"content": [image_part(1), {"type": "image_url", "image_url": "x"}]}]}, "items[1].content[1]", "neither"),
        ({"query": {"image": "@"}, "items": ["a"]}, "query.image", "base64"),
    ],
)
def test_a_bad_image_is_named(client: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    refused(client.post("/v1/score", json={"query": "q", **LABELS, **body}), words, param=param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [[1, text("a")]]}, "items[0][0]"),
        ({"items": [{"text": "a", "image": "b"}]}, "items[0]"),
        ({"items": [{}]}, "items[0]"),
        ({"items": [[image_part(1)]], "readout": "likelihood"}, "readout"),
        ({"items": [[image_part(1)], [3, 4]]}, "items[1]"),
    ],
)
def test_contents_that_cannot_be_read_are_named(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    check_refused(client.post("/v1/score", json={"query": "q", **({} if "readout" in body else LABELS), **body}), param)


def test_an_item_that_is_too_long_is_refused_alone(start: Start) -> None:
    client = start(with_vision(max_context=40))
    items = [[image_part(1)], [image_part(2, 224, 224)], "a"]
    body = {"query": "q", "items": items, **LABELS}
    answer = client.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("items[1]", "context_length_exceeded")
    told = post(client, partial_results=True, **body)
    assert [bool(row) for row in told["scores"]] == [True, False, True]
    assert told["errors"][0]["index"] == 1


def test_a_model_without_images_says_so(start: Start) -> None:
    client = start(FakeEngine(preset=PRESET))
    refused(client.post("/v1/score", json={"query": "q", "items": [[image_part(1)]], **LABELS}), "text only", param="items[0][0]")
    assert client.post("/v1/score", json={"query": [text("q")], "items": [[text("a")], "b"], **LABELS}).status_code == 200
    answer = client.post("/v1/rerank", json={"query": "q", "documents": [{"image": "AAAA"}]})
    refused(answer, "text only", param="documents[0].image")


def test_many_documents_as_objects_are_one_job(start: Start) -> None:
    client = start(FakeEngine(preset=PRESET), text_queue_bytes=1 << 20)
    documents = [{"text": f"document {number}"} for number in range(900)]
    told = post(client, "/v1/rerank", query="red", documents=documents, return_documents=True, top_n=3)
    assert [len(result["document"]["text"]) > 8 for result in told["results"]] == [True] * 3
