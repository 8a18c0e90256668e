"""Bodies of requests: what the API's own types say about them, how much repeats, and content of files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from yardstick_llm.gateway.requests.completions import CompletionRequest
from yardstick_llm.gateway.requests.rerank import RerankRequest
from yardstick_llm.gateway.requests.score import ScoreRequest
from yardstick_llm.gateway.requests.texts import EmbeddingsRequest
from yardstick_llm.gateway.schemas.chat import ChatRequest
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.content import Content, Data, Uniform
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.scenario import load
from yardstick_llm.loadgen.workloads import AnyWorkload, Chat, Completions, Embeddings, Rerank, Score


def asks(workload: AnyWorkload, count: int, share: Share | None = None, model: str | None = None) -> list[Any]:
    return list(islice(workload.asks(Content(0, share or Share(), 0), model), count))


def bodies(workload: AnyWorkload, count: int, share: Share | None = None, model: str | None = None) -> list[bytes]:
    return [ask.body for ask in asks(workload, count, share, model)]


def asked(workload: AnyWorkload, count: int, share: Share | None = None, model: str | None = None) -> list[dict[str, Any]]:
    return [json.loads(body) for body in bodies(workload, count, share, model)]


def test_the_standard_workload() -> None:
    (first, second) = asked(Score(), 2, model="ranker")
    assert first.keys() == {"model", "label_token_ids", "query", "items"}
    assert (first["model"], len(first["query"]), [len(item) for item in first["items"]]) == ("ranker", 120, [180] * 10)
    assert all(0 <= token < 1000 for item in first["items"] for token in item)
    seen = [tuple(item) for document in (first, second) for item in document["items"]]
    assert len(set(seen)) == 20
    assert first["query"] != second["query"]


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
    (chat,) = asked(Chat(logprobs=5, system="Be brief.", prompts=("Hi",)), 1)
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (chat["logprobs"], chat["top_logprobs"], chat["stream"]) == (True, 5, True)
    assert chat["stream_options"] == {"include_usage": True}
    (plain,) = asked(Completions(stream=False, input="tokens", prompt_length=9), 1)
    assert len(plain["prompt"]) == 9
    assert "stream" not in plain
    guidance = {"mode": "centered_exp", "scale": -10.0}
    assert asked(Chat(length_guidance=guidance), 1)[0]["length_guidance"] == guidance
    seeds = [document["seed"] for document in asked(Chat(), 50)]
    assert len(set(seeds)) == 50


def share_repeated(workload: Score, count: int = 600) -> tuple[float, float, float]:
    """Return three shares: requests whose query occurred before, items that did, and items that did with the same query."""
    queries: set[str] = set()
    items: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    found = [0, 0, 0]
    total = 0
    for document in asked(workload, count):
        query, now = json.dumps(document["query"]), [json.dumps(item) for item in document["items"]]
        assert len(set(now)) == len(now), "no item twice in a request"
        found[0] += query in queries
        found[1] += sum(item in items for item in now)
        found[2] += sum((query, item) in pairs for item in now)
        total += len(now)
        queries.add(query)
        items.update(now)
        pairs.update((query, item) for item in now)
    return found[0] / count, found[1] / total, found[2] / total


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


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "Welcome."}]},
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi “you”"},
            {"from": "gpt", "value": "Hello."},
            {"from": "human", "value": "Bye"},
        ],
    },
    {"id": "c", "conversations": [{"from": "human", "value": "Why?"}]},
]


def write(folder: Path, *documents: Any) -> Data:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{document if isinstance(document, str) else json.dumps(document)}\n" for document in documents))
    return Data(file=str(file))


def test_each_kind_takes_its_fields(tmp_path: Path) -> None:
    pairs = write(tmp_path, {"query": "shoes", "items": [" red", " blue"], "id": 7}, "", {"query": [1, 2], "items": [[3], [4, 5]]})
    first, second, third = asked(Score(data=pairs), 3)
    assert (first["query"], first["items"]) == ("shoes", [" red", " blue"])
    assert (second["query"], second["items"]) == ([1, 2], [[3], [4, 5]])
    assert third == first, "from the beginning again"
    assert [ask.items for ask in asks(Rerank(data=pairs), 2)] == [2, 2]
    assert asked(Rerank(data=pairs), 1)[0]["documents"] == [" red", " blue"]
    assert asked(Embeddings(data=pairs), 1)[0]["input"] == [" red", " blue"]

    prompts = write(tmp_path, {"prompt": "Hi"}, {"prompt": "Bye"})
    assert [body["prompt"] for body in asked(Completions(data=prompts), 2)] == ["Hi", "Bye"]
    assert [body["input"] for body in asked(Embeddings(data=prompts), 2)] == [["Hi"], ["Bye"]]
    assert asked(Chat(data=prompts), 1)[0]["messages"] == [{"role": "user", "content": "Hi"}]

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    talk = write(tmp_path, {"messages": messages})
    assert asked(Chat(data=talk), 1)[0]["messages"] == messages, "unchanged, as one request"
    (ask,) = asks(Chat(data=talk, turns=5), 1)
    assert json.loads(ask.body)["messages"] == messages[:1]
    assert ask.later == (b'"c"',), "the file's answers are left out, as the server gives its own"


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    file.write_text(json.dumps(SHAREGPT))
    source = Data(file=str(file), format="sharegpt")
    assert [body["prompt"] for body in asked(Completions(data=source), 3)] == ["Hi “you”", "Why?", "Hi “you”"]
    system = {"role": "system", "content": "Be brief."}
    one, two = asks(Chat(data=source, turns=2), 2)
    assert json.loads(one.body)["messages"] == [system, {"role": "user", "content": "Hi “you”"}]
    assert (one.later, two.later) == ((b'"Bye"',), ())
    (single,) = asks(Chat(data=source), 1)
    assert (json.loads(single.body)["messages"], single.later) == (json.loads(one.body)["messages"], ())


def test_rows_in_order_a_random_choice_and_workers(tmp_path: Path) -> None:
    source = write(tmp_path, *({"prompt": f"{number}"} for number in range(1000)))

    def prompts(count: int, share: Share | None = None, **settings: Any) -> list[int]:
        changed = Data(file=source.file, **settings)
        return [int(body["prompt"]) for body in asked(Completions(data=changed), count, share)]

    assert prompts(5, rows=3) == [0, 1, 2, 0, 1]
    chosen = prompts(100, rows=100, sample=True)
    assert len(set(chosen)) == 100
    assert sum(number >= 500 for number in chosen) in range(30, 71), "from the whole file"
    assert chosen != sorted(chosen)
    assert prompts(100, rows=100, sample=True) == chosen, "the seed repeats it"
    workers = [prompts(50, Share(index, 2), rows=100, sample=True) for index in (0, 1)]
    assert [number for pair in zip(*workers, strict=True) for number in pair] == chosen


WRONG = [
    (Score(), ['{"query": "a", "items": ["b"]}', "", '{"query": "a"}'], "line 3: it has no `query` with `items`"),
    (Rerank(), ['{"query": "a", "items": []}'], "line 1: it has no `query` with `items`"),
    (Score(), ['{"query": 5}'], "line 1: Expected `str | array | null`, got `int` - at `$.query`"),
    (Chat(), ['{"prompt": "a"}', '{"prompt": '], "line 2: Input data was truncated"),
    (Chat(), ['{"text": "a"}'], "line 1: it has neither `messages` nor `prompt`"),
    (Chat(turns=2), ['{"messages": [{"role": "system", "content": "a"}]}'], "line 1: its `messages` have none of the role `user`"),
    (Completions(), ['{"prompt": ""}'], "line 1: it has no `prompt`"),
    (Embeddings(), ["{}"], "line 1: it has neither `items` nor `prompt`"),
    (Chat(), [], "has no row that this workload can use"),
    (Chat(), ['{"prompt": "\ud800"}'.encode("utf-8", "surrogatepass").decode("latin-1")], "line 1"),
]


@pytest.mark.parametrize(("workload", "lines", "says"), WRONG)
def test_a_wrong_row_is_named(tmp_path: Path, workload: AnyWorkload, lines: list[str], says: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in lines))
    settings = {name: getattr(workload, name) for name in workload.__struct_fields__} | {"data": Data(file=str(file))}
    with pytest.raises(LoadError) as raised:
        asked(type(workload)(**settings), 1)
    assert str(raised.value).startswith(str(file))
    assert says in str(raised.value)


def test_a_file_lies_beside_its_scenario_and_keys_are_checked(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text('[[workloads]]\nkind = "chat"\ndata = { file = "a.jsonl" }\n')
    assert load(scenario).workloads[0].data == Data(file=str(tmp_path / "a.jsonl"))
    for text, says in [
        ('data = { file = "a", row = 5 }', "`workloads[0].data.row` is not a setting; did you mean `rows`?"),
        ('data = { file = "a", rows = 0 }', "`workloads[0].data.rows`"),
        ('data = { file = "a", format = "csv" }', "`workloads[0].data.format`"),
        ('data = { file = "a" }\nprompts = ["b"]', "`prompts` does not go with `data`"),
        ("turns = 101", "`turns` is above 100"),
    ]:
        scenario.write_text(f'[[workloads]]\nkind = "chat"\n{text}\n')
        with pytest.raises(LoadError) as raised:
            load(scenario)
        assert says in str(raised.value)
    with pytest.raises(LoadError, match="`repeated_items` do not go with `data`"):
        load(None, ["workloads[0].data.file=a", "workloads[0].repeated_items=0.5"])
