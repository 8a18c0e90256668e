"""Bodies of requests: what the API's own types say about them, how much repeats, and that a seed repeats all."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import msgspec
import pytest

from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.embeddings import EmbeddingsRequest
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.score import ScoreRequest
from loadgen.arrivals import Constant, Share
from loadgen.content import Content, Uniform
from loadgen.maker import Order, make
from loadgen.scenario import Scenario
from loadgen.workloads import AnyWorkload, Chat, Completions, Embeddings, Rerank, Score


def bodies(workload: AnyWorkload, count: int, share: Share | None = None, model: str | None = None) -> list[bytes]:
    return [ask.body for ask in islice(workload.asks(Content(0, share or Share(), 0), model), count)]


def documents(workload: AnyWorkload, count: int, **more: Any) -> list[dict[str, Any]]:
    return [json.loads(body) for body in bodies(workload, count, **more)]


def test_the_standard_workload() -> None:
    (first, second) = documents(Score(), 2, model="ranker")
    assert first.keys() == {"model", "label_token_ids", "query", "items"}
    assert (first["model"], len(first["query"]), [len(item) for item in first["items"]]) == ("ranker", 120, [180] * 10)
    assert all(0 <= token < 1000 for item in first["items"] for token in item)
    seen = [tuple(item) for document in (first, second) for item in document["items"]]
    assert len(set(seen)) == 20
    assert first["query"] != second["query"]


@pytest.mark.parametrize("vocab_size", [2, 1000, 65_536, 151_936])
def test_token_ids_fill_the_vocabulary(vocab_size: int) -> None:
    tokens = [token for document in documents(Score(vocab_size=vocab_size), 20) for item in document["items"] for token in item]
    assert 0 <= min(tokens) < 0.01 * vocab_size
    assert 0.99 * (vocab_size - 1) <= max(tokens) < vocab_size


WORKLOADS: list[tuple[AnyWorkload, type[msgspec.Struct]]] = [
    (Score(input="text", labels=(" Yes", " No"), apply_softmax=True, item_first=True, extra={"priority": 3}), ScoreRequest),
    (Score(items=Uniform(min=1, max=5)), ScoreRequest),
    (Rerank(items=3, top_n=2), RerankRequest),
    (Embeddings(items=Uniform(min=1, max=3)), EmbeddingsRequest),
    (Chat(turns=3, think_s=1.0), ChatRequest),
    (Chat(logprobs=5, system='Be "brief".', extra={"temperature": 0.5}), ChatRequest),
    (Chat(stream=False, prompts=("Describe: “red” shoes\n",)), ChatRequest),
    (Completions(logprobs=0), CompletionRequest),
    (Completions(input="tokens", prompt_length=9, stream=False, max_tokens=Uniform(min=2, max=4)), CompletionRequest),
]


@pytest.mark.parametrize(("workload", "kind"), WORKLOADS)
def test_the_gateway_understands_every_body(workload: AnyWorkload, kind: type[msgspec.Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for body in bodies(workload, 5):
        msgspec.json.decode(body, type=kind)
        assert json.loads(body).keys() <= known


def test_fields_of_generation() -> None:
    (chat,) = documents(Chat(logprobs=5, system="Be brief.", prompts=("Hi",)), 1)
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (chat["logprobs"], chat["top_logprobs"], chat["stream"]) == (True, 5, True)
    assert chat["stream_options"] == {"include_usage": True}
    (plain,) = documents(Completions(stream=False, input="tokens", prompt_length=9), 1)
    assert len(plain["prompt"]) == 9
    assert "stream" not in plain
    guidance = {"mode": "centered_exp", "scale": -10.0}
    assert documents(Chat(length_guidance=guidance), 1)[0]["length_guidance"] == guidance
    seeds = [document["seed"] for document in documents(Chat(), 50)]
    assert len(set(seeds)) == 50


def share_repeated(workload: Score, count: int = 600) -> tuple[float, float, float]:
    """Return three shares: requests whose query occurred before, items that did, and items that did with the same query."""
    queries: set[str] = set()
    items: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    found = [0, 0, 0]
    asked = 0
    for document in documents(workload, count):
        query, now = json.dumps(document["query"]), [json.dumps(item) for item in document["items"]]
        assert len(set(now)) == len(now), "no item twice in a request"
        found[0] += query in queries
        found[1] += sum(item in items for item in now)
        found[2] += sum((query, item) in pairs for item in now)
        asked += len(now)
        queries.add(query)
        items.update(now)
        pairs.update((query, item) for item in now)
    return found[0] / count, found[1] / asked, found[2] / asked


def test_nothing_repeats_unless_asked_for() -> None:
    assert share_repeated(Score(query_length=8, item_length=8)) == (0, 0, 0)


def test_shares_of_repeats() -> None:
    def shares(queries: float, items: float) -> tuple[float, float, float]:
        return share_repeated(Score(query_length=8, item_length=8, repeated_queries=queries, repeated_items=items))

    query, item, pair = shares(0.5, 0)
    assert query == pytest.approx(0.5, abs=0.07)
    assert (item, pair) == (0, 0)
    query, item, pair = shares(0, 0.5)
    assert (query, pair) == (0, 0)
    assert item == pytest.approx(0.5, abs=0.04)
    query, item, pair = shares(0.9, 0.5)
    assert query == pytest.approx(0.9, abs=0.04)
    assert item == pair == pytest.approx(0.9 * 0.5, abs=0.04), "with the same query, so that the result cache can answer"
    assert shares(1, 0.9)[2] == pytest.approx(0.9, abs=0.02)


def test_a_seed_repeats_everything_and_workers_differ() -> None:
    for workload, _ in WORKLOADS:
        assert bodies(workload, 3) == bodies(workload, 3)
        assert bodies(workload, 3)[0] != bodies(workload, 3, Share(1, 2))[0]


def test_a_mix_is_drawn_by_weight() -> None:
    scenario = Scenario(
        duration_s=40,
        arrivals=Constant(rate=100),
        workloads=(Score(weight=3, items=2, query_length=1, item_length=1), Chat(prompt_length=1)),
    )
    dues = list(make(Order(scenario, Share())))
    assert [due.scheduled for due in dues] == [place / 100 for place in range(4000)]
    scores = [due for due in dues if due.workload == 0]
    assert 2850 < len(scores) < 3150
    assert all(due.items == 2 and b'"items"' in due.body for due in scores)
    assert all(due.items == 0 and b'"messages"' in due.body for due in dues if due.workload == 1)
