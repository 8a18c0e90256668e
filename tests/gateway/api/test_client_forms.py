"""The bodies that clients of other servers send, as they send them, and what they read of the answers."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import templates
from tests.fakes import FakeEngine, ids
from tests.gateway.answers import check_refused, rendered
from tests.gateway.api.test_embeddings_api import PRESET as EMBEDDER
from tests.gateway.api.test_embeddings_api import SIZE, TEXTS, embed
from tests.gateway.api.test_rerank_api import DOCUMENTS, QUERY
from tests.gateway.api.test_rerank_api import PRESET as RERANKER
from tests.gateway.conftest import Start, gateways
from tests.gateway.keys import entry, write

LONG = "the quick brown fox " * 2000


@pytest.fixture(scope="module")
def embedder() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = FakeEngine(capabilities=("embed",), embedding_size=SIZE, pooling="last", preset=EMBEDDER)
    with gateways() as start:
        yield engine, start(engine)


@pytest.fixture(scope="module")
def reranker() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(preset=RERANKER))


NVIDIA = {"model": "fake", "encoding_format": "float"}
EMBED = {
    "LangChain NVIDIAEmbeddings": ({**NVIDIA, "input_type": "query", "truncate": "NONE"}, {"input_type": "query"}),
    "LlamaIndex NVIDIAEmbedding": ({**NVIDIA, "input_type": "passage", "truncate": "END"}, {"input_type": "document"}),
    "Weaviate text2vec-jinaai": (
        {"model": "fake", "embedding_type": "float", "normalized": True, "task": "retrieval.query", "dimensions": 8},
        {"input_type": "query", "dimensions": 8},
    ),
    "LlamaIndex JinaEmbedding": (
        {"model": "fake", "encoding_type": "float", "task": "retrieval.passage", "late_chunking": False},
        {"input_type": "document"},
    ),
    "Weaviate text2vec-voyageai": (
        {"model": "fake", "truncation": True, "input_type": "document", "output_dimension": 8},
        {"input_type": "document", "dimensions": 8},
    ),
    "Infinity": ({"model": "fake", "dimensions": 0, "modality": "text"}, {}),
    "RAGFlow OpenAI": ({**NVIDIA, "drop_params": True}, {}),
}


@pytest.mark.parametrize("client", EMBED)
def test_embeddings(embedder: tuple[FakeEngine, httpx.Client], client: str) -> None:
    body, same = EMBED[client]
    assert embed(embedder[1], **body) == embed(embedder[1], **same)


def test_lightrag_jina(embedder: tuple[FakeEngine, httpx.Client]) -> None:
    fields = {"model": "fake", "task": "text-matching", "dimensions": 8, "embedding_type": "base64"}
    found = [struct.unpack("<8f", base64.b64decode(text)) for text in embed(embedder[1], **fields)]
    assert found == [pytest.approx(row) for row in embed(embedder[1], dimensions=8)]


def test_tasks_of_jina_embeddings_v3() -> None:
    """A task is the prompt of its name, where the model has one."""
    preset = 'name = "own"\ntask = "embed"\ntemplate = ["{document}"]\n'
    preset += 'prompts = {"retrieval.query" = "Find: ", "text-matching" = "Same? ", "separation" = "Apart: "}'
    engine = FakeEngine(capabilities=("embed",), embedding_size=SIZE, pooling="last", preset=preset)
    with gateways() as start:
        client = start(engine)
        for task, prompt in {
            "text-matching": "Same? ",
            "retrieval.query": "Find: ",
            "clustering": "Apart: ",
            "retrieval": "",
        }.items():
            assert embed(client, task=task) == embed(client, **({"prompt": prompt} if prompt else {})), task


@pytest.mark.parametrize(("truncate", "kept"), [("END", "start"), ("START", "end")])
def test_nvidia_truncates_at_an_end(embedder: tuple[FakeEngine, httpx.Client], truncate: str, kept: str) -> None:
    engine, client = embedder
    text = f"start {LONG} end"
    answer = client.post("/v1/embeddings", json={"input": text, "truncate": truncate}).raise_for_status()
    assert answer.headers["x-yardstick-truncated"] == "1"
    asked = engine.scores[-1].prefix + engine.scores[-1].branches[0]
    assert asked[: len(ids("start"))] == ids("start") if kept == "start" else asked[-len(ids(" end")) :] == ids(" end")
    check_refused(client.post("/v1/embeddings", json={"input": text, "truncate": "NONE"}), "input[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"task": "retrieval"}, None),
        ({"task": "translation"}, "task"),
        ({"task": "retrieval.query", "input_type": "document"}, "task"),
        ({"task": "text-matching", "input_type": "query"}, "task"),
        ({"output_dimension": SIZE + 1}, "output_dimension"),
        ({"output_dimension": 8, "dimensions": 8}, "output_dimension"),
        ({"embedding_type": "binary"}, "embedding_type"),
    ],
)
def test_what_these_clients_cannot_ask_for(
    embedder: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], param: str | None
) -> None:
    answer = embedder[1].post("/v1/embeddings", json={"input": TEXTS, **fields})
    if param is None:
        answer.raise_for_status()
    else:
        check_refused(answer, param)


def logits(scores: dict[int, float]) -> dict[int, Any]:
    return {index: pytest.approx(math.log(score / (1 - score)), abs=1e-5) for index, score in scores.items()}


def scores_of(client: httpx.Client) -> dict[int, float]:
    answer = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).raise_for_status().json()
    return {result["index"]: result["relevance_score"] for result in answer["results"]}


@pytest.mark.parametrize("path", ["/v1/ranking", "/v1/retrieval/nvidia/reranking"])
def test_nvidia_rerank(reranker: httpx.Client, path: str) -> None:
    """LangChain's and LlamaIndex's NVIDIARerank, Haystack's NvidiaRanker and RAGFlow; Weaviate has the second path."""
    body = {"model": "fake", "query": {"text": QUERY}, "passages": [{"text": text} for text in DOCUMENTS], "truncate": "END"}
    answer = reranker.post(path, json=body).raise_for_status().json()
    found = [ranking["logit"] for ranking in answer["rankings"]]
    assert found == sorted(found, reverse=True)
    assert {ranking["index"]: ranking["logit"] for ranking in answer["rankings"]} == logits(scores_of(reranker))
    assert answer["usage"]["total_tokens"] > 0
    assert len(reranker.post(path, json=body | {"top_n": 2}).json()["rankings"]) == 2
    long = body | {"passages": [{"text": LONG}]}
    reranker.post(path, json=long).raise_for_status()
    check_refused(reranker.post(path, json=long | {"truncate": "NONE"}), "passages[0]")
    check_refused(reranker.post(path, json=body | {"stream": True}), "passages")
    check_refused(reranker.post(path, json=body | {"documents": DOCUMENTS}), "documents")


def test_the_client_of_xinference(
    embedder: tuple[FakeEngine, httpx.Client], reranker: httpx.Client, shared: httpx.Client, start: Start, tmp_path: Path
) -> None:
    """Dify, MaxKB and LangChain use it. It asks whether to send the key, and for the kind of the model."""
    found = [client.get("/v1/models/fake").json() for client in (embedder[1], reranker, shared)]
    assert [(model["model_type"], model["model_ability"]) for model in found] == [
        ("embedding", []),
        ("rerank", ["chat", "generate"]),
        ("LLM", ["chat", "generate"]),
    ]
    assert shared.get("/v1/cluster/auth").json() == {"auth": False}
    keyed = start(FakeEngine(), api_keys_file=write(tmp_path / "keys.json", entry("one")))
    assert keyed.get("/v1/cluster/auth").json() == {"auth": True}
    assert keyed.get("/v1/models/fake").status_code == 401
    body = {
        "model": "fake",
        "query": QUERY,
        "documents": DOCUMENTS,
        "top_n": 2,
        "max_chunks_per_doc": None,
        "return_documents": True,
    }
    results = reranker.post("/v1/rerank", json=body | {"return_len": None, "kwargs": "{}"}).raise_for_status().json()["results"]
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[result["index"]] for result in results]


def test_ragflow_xinference(reranker: httpx.Client) -> None:
    body = {"model": "fake", "query": QUERY, "return_documents": "true", "return_len": "true", "documents": DOCUMENTS}
    results = reranker.post("/v1/rerank", json=body).raise_for_status().json()["results"]
    assert {result["index"]: result["document"]["text"] for result in results} == dict(enumerate(DOCUMENTS))
    results = reranker.post("/v1/rerank", json=body | {"return_documents": "false"}).raise_for_status().json()["results"]
    assert "document" not in results[0]
    check_refused(reranker.post("/v1/rerank", json=body | {"return_documents": "yes"}), "return_documents")


CONTEXT_EXCEEDED = {
    "LiteLLM": "this model's maximum context length is",
    "Roo Code": r"\bcontext\s*(?:length|window)\b",
    "opencode": r"maximum context length is \d+ tokens",
    "goose": "too long",
}
"""Words by which clients see that a conversation must become shorter. They do not read the code of the error, as LangChain does."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "stream": True}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/score", {"query": LONG, "items": ["a"], "labels": [" Yes"]}),
    ],
)
def test_clients_see_that_a_prompt_is_too_long(shared: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = shared.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    missed = [client for client, words in CONTEXT_EXCEEDED.items() if not re.search(words, error["message"], re.IGNORECASE)]
    assert missed == []


def test_guidance(start: Start) -> None:
    """Its grammar stands in the forms of old and new versions of vLLM."""
    engine = FakeEngine()
    client = start(engine)
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Describe"}], "max_tokens": 4}
    forms = {"guided_grammar": 'start: "red" | "blue"', "structured_outputs": {"grammar": 'start: "red" | "blue"'}}
    client.post(path, json=body | forms | {"guided_decoding_backend": "guidance", "logprobs": True}).raise_for_status()
    client.post(path, json=body | {"guided_grammar": forms["guided_grammar"]}).raise_for_status()
    assert engine.generates[0].grammar == engine.generates[1].grammar != ""
    check_refused(client.post(path, json=body | forms | {"guided_grammar": 'start: "red"'}), "structured_outputs.grammar", "both")


def test_thinking_of_glm(start: Start) -> None:
    """Roo Code sends it with models of GLM; Z.AI, DeepSeek and Kimi define it."""
    engine = FakeEngine(template=templates.THINKING)
    client = start(engine)
    off = "<think>\n\n</think>\n\n"

    def post(**fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Describe"}], "max_tokens": 4}
        return client.post("/v1/chat/completions", json=body | fields)

    for fields, thinks in (
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, True),
    ):
        post(**fields).raise_for_status()
        assert rendered(engine).endswith(off) != thinks, fields
    check_refused(post(thinking={"type": "disabled"}, enable_thinking=True), "thinking", "does not go")
    check_refused(post(thinking={"type": "enabled", "budget_tokens": 5}), "thinking.budget_tokens", "no field")
    check_refused(post(thinking={"type": "adaptive"}), "thinking.type", "'disabled'")
