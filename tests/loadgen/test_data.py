"""Content from files: rows of both forms, random choices, bounds, and errors that name the line."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loadgen import content
from loadgen.arrivals import Share
from loadgen.content import Content, Data
from loadgen.errors import LoadError
from loadgen.scenario import load
from loadgen.workloads import AnyWorkload, Chat, Completions, Embeddings, Rerank, Score

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


def asked(workload: AnyWorkload, count: int, share: Share | None = None) -> list[dict[str, Any]]:
    return [json.loads(ask.body) for ask in islice(workload.asks(Content(0, share or Share(), 0), None), count)]


def test_each_kind_takes_its_fields(tmp_path: Path) -> None:
    pairs = write(tmp_path, {"query": "shoes", "items": [" red", " blue"], "id": 7}, "", {"query": [1, 2], "items": [[3], [4, 5]]})
    first, second, third = asked(Score(data=pairs), 3)
    assert (first["query"], first["items"]) == ("shoes", [" red", " blue"])
    assert (second["query"], second["items"]) == ([1, 2], [[3], [4, 5]])
    assert third == first, "from the beginning again"
    assert [ask.items for ask in islice(Rerank(data=pairs).asks(Content(0, Share(), 0), None), 2)] == [2, 2]
    assert asked(Rerank(data=pairs), 1)[0]["documents"] == [" red", " blue"]
    assert asked(Embeddings(data=pairs), 1)[0]["input"] == [" red", " blue"]

    prompts = write(tmp_path, {"prompt": "Hi"}, {"prompt": "Bye"})
    assert [body["prompt"] for body in asked(Completions(data=prompts), 2)] == ["Hi", "Bye"]
    assert [body["input"] for body in asked(Embeddings(data=prompts), 2)] == [["Hi"], ["Bye"]]
    assert asked(Chat(data=prompts), 1)[0]["messages"] == [{"role": "user", "content": "Hi"}]

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    talk = write(tmp_path, {"messages": messages})
    assert asked(Chat(data=talk), 1)[0]["messages"] == messages, "unchanged, as one request"
    (ask,) = islice(Chat(data=talk, turns=5).asks(Content(0, Share(), 0), None), 1)
    assert json.loads(ask.body)["messages"] == messages[:1]
    assert ask.later == (b'"c"',), "the file's answers are left out, as the server gives its own"


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    file.write_text(json.dumps(SHAREGPT))
    source = Data(file=str(file), format="sharegpt")
    assert [body["prompt"] for body in asked(Completions(data=source), 3)] == ["Hi “you”", "Why?", "Hi “you”"]
    system = {"role": "system", "content": "Be brief."}
    one, two = islice(Chat(data=source, turns=2).asks(Content(0, Share(), 0), None), 2)
    assert json.loads(one.body)["messages"] == [system, {"role": "user", "content": "Hi “you”"}]
    assert (one.later, two.later) == ((b'"Bye"',), ())
    (single,) = islice(Chat(data=source).asks(Content(0, Share(), 0), None), 1)
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


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, *({"prompt": "x" * 100} for _ in range(50)))

    def fails(says: str, **settings: Any) -> None:
        with pytest.raises(LoadError, match=says):
            content.read(Data(**({"file": source.file} | settings)), 0, lambda row: row.prompt)

    monkeypatch.setattr(content, "KEPT_BYTES", 3000)
    fails("MiB; lower `data.rows`")
    assert len(content.read(Data(file=source.file, rows=20, sample=True), 0, lambda row: row.prompt)) == 20, (
        "replaced rows do not count"
    )
    monkeypatch.setattr(content, "ROW_BYTES", 100)
    fails("line 1 has more than")
    monkeypatch.setattr(content, "FILE_BYTES", 1000)
    fails("use a part of it")
    os.mkfifo(tmp_path / "pipe")
    fails("not a regular file", file=str(tmp_path / "pipe"))
    fails("no such file", file=str(tmp_path / "none"))
    lines = tmp_path / "short.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    fails("not a JSON list of conversations.*set `data.format` to jsonl", file=str(lines), format="sharegpt")
    (tmp_path / "empty").write_text("")
    fails("has no row", file=str(tmp_path / "empty"), format="sharegpt")


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
