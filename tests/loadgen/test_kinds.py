"""Reranking, embeddings and conversations, against real gateways before fake engines, and against wrong answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.fakes import FakeEngine, library
from tests.gateway.conftest import gateways
from tests.loadgen.servers import Request, answer, serving
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.records import Run
from yardstick_llm.loadgen.runner import run
from yardstick_llm.loadgen.scenario import load

RERANK = 'name = "own"\ntask = "rerank"\ntemplate = ["{query}: {document}"]\nlabels = [" Yes", " No"]\nactivation = "softmax"\n'
EMBEDDING = 'name = "own"\ntask = "embed"\ntemplate = ["{document}"]\n'
KINDS = {
    "score": ("score", "query_length=5", "item_length=4", "vocab_size=300"),
    "rerank": ("scorer", "query_length=2", "item_length=3", "items=4", "top_n=3"),
    "embeddings": ("embedder", "item_length=3", "items=2"),
    "chat": ("score", "max_tokens=4", "prompt_length=3", "turns=3", "system=Brief.", "extra.ignore_eos=true"),
}


@pytest.fixture(autouse=True)
def no_collection_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of the tests is large: the garbage collection at the start of a run would take a second of its schedule."""
    monkeypatch.setattr("yardstick_llm.loadgen.client._undisturbed", nullcontext)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[FakeEngine, str]]:
    """The engine that generates, and the URL of the gateway before it, a reranker and an embedder."""
    engine = FakeEngine(model="score")
    reranker = FakeEngine(model="scorer", fingerprint="reranker", preset=RERANK)
    embedder = FakeEngine(model="embedder", fingerprint="embedder", capabilities=("embed",), embedding_size=6, preset=EMBEDDING)
    with gateways() as start:
        yield engine, str(start(engine, reranker, embedder).base_url).rstrip("/")


def drive(url: str, kind: str, *settings: str, **more: str) -> Run:
    """Four requests or conversations of a kind."""
    plain = [f"target.url={url}", "arrivals.kind=constant", "arrivals.rate=20", "duration_s=0.2", f"workloads[0].kind={kind}"]
    given = [f"{name}={value}" for name, value in more.items()]
    return run(load(None, [*plain, *(f"workloads[0].{setting}" for setting in settings), *given]), Share(), None, "test", None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_gateway_answers_every_kind(engines: tuple[FakeEngine, str], kind: str) -> None:
    engine, url = engines
    engine.generates.clear()
    model, *settings = KINDS[kind]
    records = drive(url, kind, f"extra.model={model}", *settings).records
    assert [record.detail for record in records if record.failure] == []
    assert all(record.prompt_tokens > 0 for record in records)
    if kind != "chat":
        assert [record.items for record in records] == [{"score": 10, "rerank": 4, "embeddings": 2}[kind]] * 4
        return
    assert sorted(record.turn for record in records) == [0] * 4 + [1] * 4 + [2] * 4
    prompts = [library().decode(request.prompt, skip_special_tokens=False) for request in engine.generates]
    last = [prompt for prompt in prompts if prompt.count("<|im_start|>user") == 3]
    assert len(last) == 4
    for prompt in last:
        earlier = max((other for other in prompts if prompt.startswith(other) and other != prompt), key=len)
        assert earlier.count("<|im_start|>user") == 2, "it carries the whole earlier turn"
        assert prompt.startswith("<|im_start|>system\nBrief.<|im_end|>")
    by_turn = [sum(record.prompt_tokens for record in records if record.turn == turn) for turn in range(3)]
    assert by_turn[0] < by_turn[1] < by_turn[2]


def test_a_conversation_carries_the_servers_answers_and_ends_with_a_failure() -> None:
    asked: list[list[dict[str, str]]] = []

    async def talk(request: Request, writer: asyncio.StreamWriter) -> None:
        messages = request.body["messages"]
        asked.append(messages)
        if len(messages) == 5:
            answer(writer, {"error": {"message": "no"}}, "500 Oops")
        else:
            text = f'said "{len(messages)}"\n'
            answer(writer, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}})

    with serving(talk) as url:
        done = drive(url, "chat", "turns=5", "stream=false", "think_s=0.05", 'prompts=["a"]', duration_s="0.05")
    user = {"role": "user", "content": "a"}
    said = [{"role": "assistant", "content": f'said "{count}"\n'} for count in (1, 3)]
    assert asked == [[user], [user, said[0], user], [user, said[0], user, said[1], user]]
    assert [(record.turn, record.failure) for record in done.records] == [(0, None), (1, None), (2, "status")]
    first, second, _ = done.records
    assert second.scheduled >= first.end + 0.049, "the pause is no part of a latency"
    assert second.latency < 0.049


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rerank", {"results": [{"index": 0, "relevance_score": 1.0}]}, "1 results for 1 documents, instead of one for each of 2"),
    ("rerank", {"results": [{"index": 0, "relevance_score": 1.0}] * 2}, "2 results for 1 documents"),
    ("rerank", {"results": [{"index": 0, "relevance_score": 1.0}, {"index": 2, "relevance_score": 1.0}]}, "instead of one"),
    ("rerank", {"results": [{"index": 0}]}, "relevance_score"),
    ("embeddings", {"data": [{"index": 0, "embedding": [0.5]}]}, "1 embeddings for 2 texts"),
    ("embeddings", {"data": [{"index": 1, "embedding": "AA=="}, {"index": 0, "embedding": "AA=="}]}, "another order"),
    ("embeddings", {"data": [{"index": 0, "embedding": [0.5]}, {"index": 1, "embedding": [0.5, 1]}]}, "different lengths"),
    ("embeddings", {"data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}]}, "empty"),
]


@pytest.mark.slow
def test_wrong_answers_are_failures() -> None:
    for kind in ("rerank", "embeddings"):
        cases = [(body, says) for its, body, says in WRONG if its == kind]
        left = [json.dumps(body).encode() for body, _ in cases]

        async def wrong(request: Request, writer: asyncio.StreamWriter) -> None:
            answer(writer, left.pop(0))  # noqa: B023 - the server ends before the next kind

        with serving(wrong) as url:
            done = drive(url, kind, "items=2")
        assert [record.failure for record in done.records] == ["bad_body"] * 4
        for record, (_, says) in zip(done.records, cases, strict=True):
            assert says in record.detail
