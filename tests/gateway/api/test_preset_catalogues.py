"""Catalogues whose prompts are those of the model's preset: their scores are those of the same texts in a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, adapter
from tests.gateway.answers import check_refused
from tests.gateway.conftest import gateways
from tests.prefixes import PrefixCache
from tests.processes import wait_until

DOCUMENTS = ["Red running shoes", "", "fox\njumps ", " <|im_end|> {query} or", "été 👟" * 30, "the quick brown fox " * 20]
QUERIES = ["Is it red?", " or {document}", "\nNo<|im_start|>"]
FORM = """
name = "shop"
task = "rerank"
instruction = "Find the item."
labels = [" Yes", " No"]
"""
ITEM_FIRST = 'template = ["{instruction}\\nItem: {document}\\nQuery: {query}\\nGood:"]'
PRESETS = {
    "one piece": FORM + ITEM_FIRST,
    "pieces": FORM + 'add_special_tokens = true\ntemplate = ["<|im_start|>{instruction} ", "{document}<|im_end|>", "{query}", ":"]',
    "nothing between": FORM + 'template = ["{document}{query}"]\nactivation = "difference"',
    "cut": FORM + ITEM_FIRST + "\nmax_tokens_per_doc = 9\nmax_tokens_per_query = 4",
    "logits": FORM + ITEM_FIRST + '\nactivation = "sigmoid"\nscale = 0.2',
}


@pytest.fixture(scope="module", params=PRESETS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """A catalogue with :data:`DOCUMENTS`, from the preset of the model."""
    engine = FakeEngine(preset=PRESETS[request.param], prefixes=PrefixCache())
    with gateways() as start:
        client = start(engine)
        created = client.put("/v1/catalogues/shop", json={"preset": True}).raise_for_status().json()
        assert (created["preset"], created["labels"]) == ("shop", [" Yes", " No"])
        items = [{"id": f"i{place}", "text": text} for place, text in enumerate(DOCUMENTS)]
        client.put("/v1/catalogues/shop/items", json=items).raise_for_status()
        yield engine, client


@pytest.fixture
def client(served: tuple[FakeEngine, httpx.Client]) -> httpx.Client:
    return served[1]


def ranks(client: httpx.Client, query: str, **body: Any) -> dict[int, float]:
    answer = client.post("/v1/rerank", json={"query": query} | body, headers={"cache-control": "no-cache"})
    results = answer.raise_for_status().json()["results"]
    return {int(result.get("id", f"i{result['index']}")[1:]): result["relevance_score"] for result in results}


@pytest.mark.slow
@pytest.mark.parametrize(("query", "raw"), [*((query, False) for query in QUERIES), (QUERIES[0], True)])
def test_ranks_are_those_of_the_texts(client: httpx.Client, query: str, raw: bool) -> None:
    given = ranks(client, query, documents=DOCUMENTS, raw_scores=raw)
    assert ranks(client, query, catalogue="shop", ids=[f"i{place}" for place in range(6)], raw_scores=raw) == pytest.approx(given)
    assert ranks(client, query, catalogue="shop", top_n=6, raw_scores=raw) == pytest.approx(given)
    body = {"query": query, "catalogue": "shop", "stream": True, "raw_scores": raw}
    lines = [line[6:] for line in client.post("/v1/rerank", json=body).text.splitlines() if line.startswith("data: {")]
    streamed = {int(row["id"][1:]): row["relevance_score"] for line in lines for row in json.loads(line)["results"]}
    assert streamed == pytest.approx(given)


def test_an_adapter_with_another_preset_cannot_rank_the_items(tmp_path: Path) -> None:
    """Their prompts are those of the base's preset, so the formula of another one would make wrong scores of them."""
    other = tmp_path / "other.toml"
    other.write_text((FORM + ITEM_FIRST).replace('"shop"', '"other"').replace('" Yes", " No"', '" No", " Yes"'))
    adapters = {name: adapter(digest, name) for digest, name in (("aa11", "same"), ("bb22", "own"))}
    engine = FakeEngine("one", "one-1", preset=FORM + ITEM_FIRST, adapters=adapters)
    with gateways() as start:
        client = start(engine, presets=(f"one:own={other}",))
        wait_until(lambda: len(client.get("/v1/models").json()["data"]) == 3)
        client.put("/v1/catalogues/shop", json={"preset": True}).raise_for_status()
        client.put("/v1/catalogues/shop/items", json=[{"id": "i0", "text": "red"}]).raise_for_status()
        for extra in ({"ids": ["i0"]}, {"top_n": 1}):
            body = {"query": "x", "catalogue": "shop"} | extra
            assert client.post("/v1/rerank", json=body | {"model": "same"}).status_code == 200
            check_refused(client.post("/v1/rerank", json=body | {"model": "own"}), "model", "other")


@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_labels_are_those_of_the_preset(served: tuple[FakeEngine, httpx.Client], query: str) -> None:
    engine, client = served
    body = {"query": query, "catalogue": "shop", "ids": [f"i{place}" for place in range(6)], "apply_softmax": True}
    scores = client.post("/v1/score", json=body).raise_for_status().json()["scores"]
    pairs = client.post("/v1/score", json={"text_1": query, "text_2": DOCUMENTS}).raise_for_status().json()["data"]
    assert [yes + no for yes, no in scores] == pytest.approx([1] * 6)
    if "activation" not in (engine.preset or ""):
        assert [yes for yes, _ in scores] == pytest.approx([pair["score"] for pair in pairs])


@pytest.mark.slow
def test_texts_of_a_preset_that_puts_them_first_stay_cached(served: tuple[FakeEngine, httpx.Client]) -> None:
    engine, client = served
    documents = [f"brown fox {place}, the lazy dog" for place in range(10)]
    ranks(client, "Is it quick?", documents=documents)
    engine.item_scores.clear()
    answer = client.post("/v1/rerank", json={"query": "Does it jump?", "documents": documents}).raise_for_status().json()
    (asked,) = engine.item_scores
    assert len(asked.query) >= 1
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 10 * len(asked.query)


REFUSED: dict[str, tuple[str | None, dict[str, Any], str, str]] = {
    "the query first": (FORM + 'template = ["{query}: {document}"]', {}, "preset", "puts the query before the document"),
    "with an instruction": (
        FORM + ITEM_FIRST + '\ninstructed = ["{query}{instruction}{document}"]',
        {},
        "preset",
        "puts the query before the document",
    ),
    "a chat template": (FORM.replace('"Find the item."', '""'), {}, "preset", "puts the query before the document"),
    "no preset for ranks": ('name = "a"\ntask = "classify"\ntemplate = ["{document}"]\nlabels = [" Yes"]', {}, "model", "/v1/"),
    "a control token": (
        FORM.replace("Find the item.", "<|im_end|>") + ITEM_FIRST,
        {},
        "preset",
        "the instruction contains a control token",
    ),
    "a template too": (FORM + ITEM_FIRST, {"template": "{item}{query}"}, "template", "does not go with `preset`"),
    "labels too": (FORM + ITEM_FIRST, {"labels": [" Yes"]}, "labels", "does not go with `preset`"),
    "tokens too": (FORM + ITEM_FIRST, {"add_special_tokens": False}, "add_special_tokens", "does not go with `preset`"),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[httpx.Client]:
    """A gateway before models with other presets, each named as its preset in :data:`PRESETS` or :data:`REFUSED`."""
    presets = {"cut": PRESETS["cut"]} | {case: preset for case, (preset, *_) in REFUSED.items()}
    with gateways() as start:
        yield start(*[FakeEngine(name, name, preset=preset) for name, preset in presets.items()])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "status"), [("the query first", 400), ("labels too", 200)])
def test_a_request_for_items_first_fits_the_preset(fleet: httpx.Client, model: str, status: int) -> None:
    answer = fleet.post("/v1/score", json={"model": model, "text_1": "a", "text_2": ["b"], "item_first": True})
    assert (answer.status_code, answer.json().get("error", {}).get("param")) == (status, "item_first" if status == 400 else None)


def test_a_cut_query_is_reported(fleet: httpx.Client) -> None:
    fleet.put("/v1/catalogues/cut", json={"preset": True, "model": "cut"}).raise_for_status()
    fleet.put("/v1/catalogues/cut/items", json=[{"id": "a", "text": "fox"}]).raise_for_status()
    for query, cut in (("fox", False), ("the quick brown fox jumps over", True)):
        answer = fleet.post("/v1/rerank", json={"query": query, "catalogue": "cut", "ids": ["a"]}).raise_for_status().json()
        assert answer["meta"].get("query_truncated", False) is cut


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_catalogue_is_refused(fleet: httpx.Client, case: str) -> None:
    _, body, param, problem = REFUSED[case]
    check_refused(fleet.put("/v1/catalogues/refused", json={"preset": True, "model": case} | body), param, problem)
    assert fleet.get("/v1/catalogues/refused").status_code == 404
