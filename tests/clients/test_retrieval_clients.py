"""Published clients get the results of ``/v1/rerank`` and ``/v1/embeddings`` that plain HTTP gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environments import SCRIPTS, run, run_client, run_together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUERY = "red running shoes"
DOCUMENTS = ["blue table", "crimson jogging sneakers", "the lazy dog"]
TEXTS = ["red running shoes", "blue table"]
SDK_2 = Path(sys.prefix) / "openai-2"
"""Where `make setup` puts version 2 of the OpenAI SDK."""


def url_of(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def best(client: httpx.Client, top_n: int = 2) -> list[list[Any]]:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": top_n}
    results = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
    return [[result["index"], pytest.approx(result["relevance_score"], abs=1e-6)] for result in results]


def embeddings(client: httpx.Client, texts: list[str], **fields: int | str) -> list[Any]:
    answer = client.post("/v1/embeddings", json={"input": texts} | fields).raise_for_status().json()
    return [pytest.approx(entry["embedding"], abs=1e-6) for entry in answer["data"]]


def test_clients_of_one_environment(reranker: httpx.Client, embedder: httpx.Client) -> None:
    """The providers of rerankers differ in the paths and fields that LiteLLM sends."""
    ranking = [("llamaindex_rerank.py", "reranker"), ("haystack_rerank.py", "reranker"), ("langchain_rerank.py", "reranker")]
    ranking += [("litellm_rerank.py", f"{provider}/reranker") for provider in ("hosted_vllm", "cohere", "jina_ai")]
    embedding = {
        "haystack_embed.py": embeddings(embedder, TEXTS, normalize=False),
        "langchain_embeddings.py": embeddings(embedder, [*TEXTS, TEXTS[0]]),
        "litellm_embeddings.py": embeddings(embedder, TEXTS),
    }
    runs = [(script, url_of(reranker), model) for script, model in ranking]
    runs += [(script, url_of(embedder), "embedder") for script in embedding]
    told = run_together("python", *runs, HF_HUB_OFFLINE="0")
    assert dict(zip(ranking, told, strict=False)) == dict.fromkeys(ranking, best(reranker))
    assert dict(zip(embedding, told[len(ranking) :], strict=True)) == embedding


def test_the_cohere_sdk(reranker: httpx.Client, embedder: httpx.Client) -> None:
    runs = ("cohere_rerank.py", url_of(reranker), "reranker"), ("cohere_embed.py", url_of(embedder), "embedder")
    ranked, embedded = run_together("cohere", *runs)
    documents = embeddings(embedder, TEXTS, input_type="document")
    codes = [[round(127 * number) for number in row.expected] for row in documents]
    assert (ranked, embedded) == (best(reranker), [documents, codes, documents, documents])


def test_the_external_reranker_of_open_webui(reranker: httpx.Client) -> None:
    """Its package is too large to install: this is the request that it sends and the way it reads the answer."""
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "top_n": len(DOCUMENTS)}
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "someone"}
    answer = httpx.post(f"{url_of(reranker)}/v1/rerank", json=body, headers=headers, timeout=20).raise_for_status().json()
    ordered = sorted(answer["results"], key=lambda result: result["index"])
    scores = [result["relevance_score"] for result in ordered]
    assert sorted(enumerate(scores), key=lambda entry: -entry[1]) == [tuple(entry) for entry in best(reranker, top_n=3)]


def test_clients_of_this_environment(embedder: httpx.Client) -> None:
    runs = [(script, url_of(embedder), "embedder") for script in ("huggingface_embed.py", "openai_embeddings.py")]
    (vectors, scores), of_openai = run_together("", *runs, HF_HUB_OFFLINE="0")
    assert vectors == embeddings(embedder, TEXTS)
    assert scores == [pytest.approx(1, abs=1e-5), pytest.approx(sum(a * b for a, b in zip(*vectors, strict=True)), abs=1e-5)]
    assert of_openai == embeddings(embedder, TEXTS, dimensions=16)


def test_embeddings_of_version_2_of_the_openai_sdk(embedder: httpx.Client) -> None:
    script = SCRIPTS / "openai_embeddings.py"
    command = [sys.executable, "-W", "ignore", str(script), url_of(embedder), "embedder"]
    assert json.loads(run(command, SCRIPTS, script, 60, {"PYTHONPATH": str(SDK_2)})) == embeddings(embedder, TEXTS, dimensions=16)


def test_embeddings_of_the_openai_sdk_for_node(embedder: httpx.Client) -> None:
    assert run_client("node_openai.mjs", url_of(embedder), "embedder") == embeddings(embedder, TEXTS)
