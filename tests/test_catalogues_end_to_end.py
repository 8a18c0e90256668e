"""Registered items with a real engine and a real gateway: scores are those of each prompt alone, and items stay cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.processes import Pod, Program, gateway_before

pytestmark = pytest.mark.slow

TEMPLATE = "Item: {item}\nQuery:{query}"
ITEMS = {f"i{number}": text for number, text in enumerate(["red shoes, blue", "", "an oak table " * 6, "Yés 👟", "d"])}
QUERIES = [" Is it red?", " or", " Yes the fox"]
LABELS = ("Yes", " No")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[Program]:
    """Before two engines. tests/gateway/api/test_catalogues_api.py has catalogues in Redis, too."""
    with Pod(model, "--name", "tiny") as one, Pod(model, "--name", "tiny") as two, gateway_before(one, two) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model)


@torch.inference_mode()
def expected(reference: Any, item: str, query: str) -> list[float]:
    decoder, tokenizer = reference
    text = TEMPLATE.replace("{item}", item).replace("{query}", query)
    probabilities = decoder(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].softmax(-1)
    return [probabilities[tokenizer(label).input_ids[0]].item() for label in LABELS]


def register(gateway: Program, items: dict[str, str]) -> dict[str, Any]:
    body = [{"id": id, "text": text} for id, text in items.items()]
    return gateway.client.put("/v1/catalogues/shop/items", json=body).raise_for_status().json()


def check(gateway: Program, reference: Any, items: dict[str, str], query: str, **headers: str) -> int:
    """Compare the scores of items; return the number of cached tokens."""
    body = {"query": query, "catalogue": "shop", "ids": list(items), "labels": ["Yes", " No"]}
    answer = gateway.client.post("/v1/score", json=body, headers=headers).raise_for_status().json()
    for item, scores in zip(items.values(), answer["scores"], strict=True):
        assert scores == pytest.approx(expected(reference, item, query), abs=1e-5), (item, query)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_scores_are_exact_cold_cached_registered_again_and_after_changes(gateway: Program, reference: Any) -> None:
    items = dict(ITEMS)
    form = {"template": TEMPLATE, "model": "tiny"}
    gateway.client.put("/v1/catalogues/shop", json=form).raise_for_status()
    register(gateway, items)
    assert check(gateway, reference, items, QUERIES[0], **{"cache-control": "no-store"}) == 0
    check(gateway, reference, items, QUERIES[0])
    state = gateway.client.get("/v1/catalogues/shop").json()
    least = state["tokens"] - 2 * len(items)
    for query in QUERIES[1:]:
        assert check(gateway, reference, items, query) >= least, "engines find the items, whichever has them"
    assert register(gateway, items)["unchanged"] == 5
    assert check(gateway, reference, items, " again") >= least, "the same content keeps its keys and values"
    items |= {"i1": "not empty any more", "i4": "dd"}
    assert register(gateway, {id: items[id] for id in ("i1", "i4")})["changed"] == 2
    for query in QUERIES:
        check(gateway, reference, items, query)
    gateway.client.delete("/v1/catalogues/shop/items", params={"id": "i0"}).raise_for_status()
    body = {"query": "a", "catalogue": "shop", "ids": ["i0"], "labels": ["Yes"]}
    assert gateway.client.post("/v1/score", json=body).status_code == 404
    del items["i0"]
    check(gateway, reference, items, QUERIES[0])
    best = gateway.client.post("/v1/score", json=body | {"ids": None, "top_n": 2, "query": " or"}).raise_for_status().json()
    ranked = sorted(items, key=lambda id: -expected(reference, items[id], " or")[0])
    assert best["ids"] == ranked[:2]
    gateway.client.delete("/v1/catalogues/shop").raise_for_status()
