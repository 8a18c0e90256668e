"""``/v1/embeddings`` and ``/embed``."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.answers import check_refused
from tests.gateway.conftest import Start

SIZE = 24
TEXTS = ["red running shoes", "the quick brown fox"]
PRESET = """
name = "own"
task = "embed"
template = ["{document}"]
instructed = ["Is it: {instruction}\\nquery:{document}"]
instruction = "Find"
"""
ENGINE = {"capabilities": ("embed",), "embedding_size": SIZE, "preset": PRESET}


def embed(client: httpx.Client, **body: Any) -> list[list[float]]:
    answer = client.post("/v1/embeddings", json={"input": TEXTS} | body).raise_for_status().json()
    return [entry["embedding"] for entry in answer["data"]]


def test_one_embedding_for_each_text(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status().json()
    assert [(entry["index"], entry["object"], len(entry["embedding"])) for entry in answer["data"]] == [
        (0, "embedding", SIZE),
        (1, "embedding", SIZE),
    ]
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in TEXTS)
    assert all(sum(number**2 for number in entry["embedding"]) == pytest.approx(1) for entry in answer["data"])
    assert embed(client, input=TEXTS[0]) == embed(client)[:1] == embed(client, input=ids(TEXTS[0]))
    assert embed(client, input=[ids(text) for text in TEXTS]) == embed(client)


def test_the_openai_sdk(client: httpx.Client) -> None:
    """It asks for base64 by itself."""
    sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    answer = sdk.embeddings.create(model="fake", input=TEXTS)
    assert [entry.embedding for entry in answer.data] == [pytest.approx(numbers, abs=1e-6) for numbers in embed(client)]
    short = sdk.embeddings.create(model="fake", input=TEXTS, dimensions=8, encoding_format="float")
    assert [len(entry.embedding) for entry in short.data] == [8, 8]


def test_dimensions_and_normalize(client: httpx.Client, engine: FakeEngine) -> None:
    (short,) = embed(client, input=["dimensions"], dimensions=4, normalize=False)
    assert (len(short), engine.scores[-1].readout.dimensions, engine.scores[-1].readout.normalize) == (4, 4, False)  # type: ignore[union-attr]
    check_refused(client.post("/v1/embeddings", json={"input": "a", "dimensions": SIZE + 1}), "dimensions", f"have {SIZE} numbers")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "fox"),
        ({"input_type": "document"}, "fox"),
        ({"input_type": "query"}, "Is it: Find\nquery:fox"),
        ({"prompt_name": "query"}, "Is it: Find\nquery:fox"),
        ({"instruction": "Buy"}, "Is it: Buy\nquery:fox"),
    ],
)
def test_queries_have_an_instruction(client: httpx.Client, engine: FakeEngine, fields: dict[str, str], text: str) -> None:
    client.post("/v1/embeddings", json={"input": "fox", **fields}, headers={"cache-control": "no-cache"}).raise_for_status()
    asked = engine.scores[-1]
    assert asked.prefix + asked.branches[0] == ids(text)


def test_embeddings_are_cached(client: httpx.Client) -> None:
    body = {"input": ["cached", "twice", "cached"]}
    assert client.post("/v1/embeddings", json=body).headers["x-yardstick-cache"] == "0/3"
    again = client.post("/v1/embeddings", json=body)
    assert again.headers["x-yardstick-cache"] == "3/3"
    assert client.post("/v1/embeddings", json=body | {"dimensions": 5}).headers["x-yardstick-cache"] == "0/3"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": [[]]},
        {"input": "a", "inputs": "b"},
        {"input": "a", "dimensions": -1},
        {"input": "a", "encoding_format": "hex"},
        {"input": "a", "input_type": "document", "instruction": "b"},
        {"input": ["a", 1]},
        {"input": "fox " * 5000},
    ],
)
def test_bad_input(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/embeddings", json=fields)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_the_numbers_of_an_answer_are_bounded(start: Start) -> None:
    client = start(FakeEngine(capabilities=("embed",), embedding_size=1 << 20))
    check_refused(client.post("/v1/embeddings", json={"input": ["a"] * 5}), "input", "at most 4194304")


@pytest.mark.parametrize("most", [5, 20])
def test_texts_are_cut_to_as_many_tokens_as_are_asked_for(client: httpx.Client, engine: FakeEngine, most: int) -> None:
    client.post("/v1/embeddings", json={"input": "fox " * 100, "truncate_prompt_tokens": most}).raise_for_status()
    (prompt,) = [score.prefix + score.branches[0] for score in engine.scores[-1:]]
    assert len(prompt) == most


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 2},
        {"truncate": True},
        {"instruction": "Find."},
        {"input_type": "query"},
        {"prompt_name": "query"},
    ],
    ids=str,
)
def test_token_ids_are_never_changed(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/embeddings", json={"input": [[1, 2, 3]], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
