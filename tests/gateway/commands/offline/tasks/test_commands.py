"""``yardstick rerank | score | embed | batch`` on a gateway before a fake engine."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.commands.offline.rows import Row
from gateway.commands.offline.tasks import duplicates
from tests.gateway.commands.offline.conftest import Served, Yardstick, lines, write_texts

PAIRS = [("red shoes", "running shoes"), ("red shoes", "a blue table"), ("fox", "the lazy dog"), ("fox", "a quick fox")]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ask(served: Served, path: str, **body: Any) -> Any:
    return httpx.post(served.url + path, json=body).raise_for_status().json()


def relevance(served: Served, query: str, documents: list[str]) -> list[float]:
    results = ask(served, "/v1/rerank", query=query, documents=documents)["results"]
    return [result["relevance_score"] for result in sorted(results, key=lambda result: result["index"])]


def test_embed(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", 100)
    output = tmp_path / "out.jsonl"
    done = yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, "--keep", "text")
    assert done.status == 0, done.err
    assert f"{output} is complete" in done.err
    texts = [row["text"] for row in lines(source)]
    direct = [entry["embedding"] for entry in ask(embedder, "/v1/embeddings", input=texts)["data"]]
    rows = enumerate(zip(texts, direct, strict=True), start=1)
    assert lines(output) == [{"row": row, "text": text, "embedding": numbers} for row, (text, numbers) in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.state.json"]


def test_embed_options_reach_the_server(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"body": "red shoes"}])
    named = ("--text-column", "body", "--dimensions", 3, "--model", "fake")
    assert yardstick("embed", "--input", source, "--output", tmp_path / "o.jsonl", "--url", embedder.url, *named).status == 0
    (row,) = lines(tmp_path / "o.jsonl")
    assert row["embedding"] == ask(embedder, "/v1/embeddings", input="red shoes", dimensions=3)["data"][0]["embedding"]


def test_rerank_lists(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    rows = [{"query": query, "documents": [f"{document} {number}" for number in range(9)]} for query, document in PAIRS]
    output = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", rows)
    assert yardstick("rerank", "--input", source, "--output", output, "--url", reranker.url).status == 0
    assert [row["scores"] for row in lines(output)] == [relevance(reranker, **row) for row in rows]


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_rerank_pairs_share_requests(reranker: Served, yardstick: Yardstick, tmp_path: Path, batch: int) -> None:
    source = write(tmp_path / "in.jsonl", [{"query": query, "document": document} for query, document in PAIRS * 3])
    output = tmp_path / "out.jsonl"
    done = yardstick("rerank", "--input", source, "--output", output, "--url", reranker.url, "--batch", batch)
    assert done.status == 0, done.err
    alone = [relevance(reranker, query, [document])[0] for query, document in PAIRS] * 3
    assert [row["score"] for row in lines(output)] == pytest.approx(alone, abs=1e-12)


def test_score(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    given = ("--url", reranker.url, "--labels", " Yes, No", "--apply-softmax", "--suffix", "?")
    source = write(tmp_path / "in.jsonl", [{"query": query, "item": item} for query, item in PAIRS])
    assert yardstick("score", "--input", source, "--output", tmp_path / "out.jsonl", *given).status == 0
    options = {"labels": [" Yes", " No"], "apply_softmax": True}
    direct = [ask(reranker, "/v1/score", query=query, items=[item + "?"], **options)["scores"][0] for query, item in PAIRS]
    assert [row["scores"] for row in lines(tmp_path / "out.jsonl")] == direct
    listed = write(tmp_path / "lists.jsonl", [{"items": [item for _, item in PAIRS]}])
    one = ("--query", "red shoes", *given)
    assert yardstick("score", "--input", listed, "--output", tmp_path / "lists-out.jsonl", *one).status == 0
    items = [item + "?" for _, item in PAIRS]
    (row,) = lines(tmp_path / "lists-out.jsonl")
    assert row["scores"] == ask(reranker, "/v1/score", query="red shoes", items=items, **options)["scores"]


FORMS = [({"query": "red", "item": " shoes"}, "likelihood"), ({"query": "red", "items": [" shoes", " hat"]}, "likelihoods")]


@pytest.mark.parametrize(("row", "column"), FORMS)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_likelihoods(reranker: Served, yardstick: Yardstick, tmp_path: Path, row: dict[str, Any], column: str, ending: str) -> None:
    source, output = write(tmp_path / "in.jsonl", [row] * 3), tmp_path / f"out.{ending}"
    given = ("--input", source, "--output", output, "--url", reranker.url, "--readout", "likelihood", "--suffix", "!")
    assert yardstick("score", *given).status == 0
    items = [item + "!" for item in row.get("items", [row.get("item")])]
    direct = ask(reranker, "/v1/score", query="red", items=items, readout="likelihood")["data"]
    expected = [{name: value for name, value in item.items() if name != "index"} for item in direct]
    if ending == "jsonl":
        found = [line[column] for line in lines(output)]
    elif ending == "csv":
        with output.open(newline="", encoding="utf-8") as stream:
            found = [json.loads(line[column]) for line in csv.DictReader(stream)]
    else:
        found = pytest.importorskip("pyarrow.parquet").read_table(output).to_pydict()[column]
    assert found == [expected if column == "likelihoods" else expected[0]] * 3


def test_csv_in_and_out(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = [[index, query, f"{document},\n{index}"] for index, (query, document) in enumerate(PAIRS)]
        csv.writer(stream).writerows([["id", "query", "document"], *rows])
    output = tmp_path / "out.csv"
    kept = ("--keep", "id", "--keep", "document")
    assert yardstick("rerank", "--input", tmp_path / "in.csv", "--output", output, "--url", reranker.url, *kept).status == 0
    with output.open(newline="", encoding="utf-8") as stream:
        header, *found = csv.reader(stream)
    assert header == ["row", "id", "document", "score"]
    assert [row[:3] for row in found] == [[str(index + 1), str(index), document] for index, _, document in rows]
    direct = [relevance(reranker, query, [document])[0] for _, query, document in rows]
    assert [float(row[3]) for row in found] == pytest.approx(direct, abs=1e-12)
    assert not (tmp_path / "out.csv.part.jsonl").exists()


def test_lists_in_csv_are_json(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    documents = ["one, two", "three"]
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["query", "documents"], ["q", json.dumps(documents)], ["q", "no list"]])
    output = tmp_path / "out.csv"
    assert yardstick("rerank", "--input", tmp_path / "in.csv", "--output", output, "--url", reranker.url).status == 1
    with output.open(newline="", encoding="utf-8") as stream:
        _, (number, scores) = csv.reader(stream)
    assert (number, json.loads(scores)) == ("1", relevance(reranker, "q", documents))
    (failed,) = lines(tmp_path / "out.csv.failed.jsonl")
    assert (failed["row"], failed["line"], failed["error"]) == (2, 3, "column 'documents' is not a list of texts")


def test_parquet_in_and_out(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"red {number}" for number in range(500)]
    mixed = [None if number % 3 else number / 2 for number in range(500)]
    parquet.write_table(arrow.table({"id": range(500), "text": texts, "mixed": mixed}), tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    kept = ("--keep", "id", "--keep", "text", "--keep", "mixed")
    done = yardstick("embed", "--input", tmp_path / "in.parquet", "--output", output, "--url", embedder.url, *kept)
    assert done.status == 0, done.err
    table = parquet.read_table(output)
    assert [str(field.type) for field in table.schema] == ["int64", "int64", "string", "double", "list<element: float>"]
    found = table.to_pydict()
    assert (found["row"], found["id"], found["text"]) == ([*range(1, 501)], [*range(500)], texts)
    assert found["mixed"] == mixed
    direct = [entry["embedding"] for entry in ask(embedder, "/v1/embeddings", input=texts)["data"]]
    assert all(row == pytest.approx(numbers, rel=1e-6) for row, numbers in zip(found["embedding"], direct, strict=True))


def test_failures_do_not_stop_the_run(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    """A text that is too long fails alone, although it shares its request with others."""
    rows = [{"text": "a", "id": 1}, {"text": "red " * 4000, "id": 2}, {"id": 3}, {"text": 5}, {"text": "b"}]
    source = write(tmp_path / "in.jsonl", rows)
    with source.open("a") as stream:
        stream.write("{oops\n\n" + json.dumps({"text": "c"}) + "\n")
    output = tmp_path / "out.jsonl"
    done = yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, "--keep", "id")
    assert done.status == 1
    assert "3 results, 4 failed (see " in done.err
    assert [row["row"] for row in lines(output)] == [1, 5, 7]
    long, none, number, broken = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert (long["row"], long["id"], long["status"], long["code"]) == (2, 2, 400, "context_length_exceeded")
    assert (none["row"], none["error"]) == (3, "no column 'text'")
    assert (number["row"], number["error"]) == (4, "column 'text' is not a text")
    assert (broken["row"], broken["line"]) == (6, 6)
    assert "not JSON" in broken["error"]
    again = yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, "--keep", "id")
    assert (again.status, "was finished before" in again.err) == (1, True)


CHAT = "/v1/chat/completions"


def request(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def test_a_repeated_custom_id_is_refused_before_any_request(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    names = [*map(str, range(50)), "seven", 5, None, 5, *map(str, range(50, 99)), "seven", "0"]
    rows = [{"custom_id": name, "url": "/v1/rerank", "body": {"query": "q", "documents": ["d"]}} for name in names]
    source, asked = write(tmp_path / "in.jsonl", rows), len(reranker.engine.scores)
    done = yardstick("batch", "--input", source, "--output", tmp_path / "out.jsonl", "--url", reranker.url)
    assert done.status == 2
    assert "in.jsonl, line 104: the custom_id 'seven' is that of line 51; give each request its own" in done.err
    assert len(reranker.engine.scores) == asked
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_names_that_share_a_bit_are_no_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_BYTES", 4)
    rows = [Row(number, number, 0, 0, {"custom_id": f"name {number}"}) for number in range(1, 1001)]
    name_of = lambda row: row.fields["custom_id"]  # noqa: E731
    assert duplicates.first_duplicate(lambda: iter(rows), name_of) is None
    again = Row(1001, 1002, 0, 0, {"custom_id": "name 700"})
    assert duplicates.first_duplicate(lambda: iter([*rows, again]), name_of) == duplicates.Duplicate("name 700", 700, 1002)


def test_batch(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": "red"}], "model": "fake", "max_tokens": 3, "seed": 1}
    rows = [
        request("chat", **said),
        request("rank", "/v1/rerank", query="fox", documents=["a fox", "a dog"]),
        request("other", **said | {"model": "other"}),
        request("stream", **said, stream=True),
        request("away", "//other.example/v1/score"),
        request("get") | {"method": "GET"},
        {"url": "/v1/score", "body": {}},
        request("again", **said),
    ]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert yardstick("batch", "--input", source, "--output", output, "--url", reranker.url).status == 1
    chat, rank, again = lines(output)
    assert [answer["custom_id"] for answer in (chat, rank, again)] == ["chat", "rank", "again"]
    assert (chat["id"], chat["error"], chat["response"]["status_code"]) == ("batch_req_1", None, 200)
    assert chat["response"]["request_id"]
    text = chat["response"]["body"]["choices"][0]["message"]["content"]
    assert (
        text
        == again["response"]["body"]["choices"][0]["message"]["content"]
        == ask(reranker, CHAT, **said)["choices"][0]["message"]["content"]
    )
    assert len(rank["response"]["body"]["results"]) == 2
    other, stream, away, get, no_id = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert (other["custom_id"], other["response"]["status_code"], other["error"]) == ("other", 404, None)
    assert other["response"]["body"]["error"]["code"] == "model_not_found"
    assert (stream["response"], "`stream`" in stream["error"]["message"]) == (None, True)
    assert "//other.example" in away["error"]["message"]
    assert "only POST" in get["error"]["message"]
    assert (no_id["row"], "custom_id" in no_id["error"]["message"]) == (7, True)
    assert yardstick("batch", "--input", source, "--output", output, "--url", reranker.url).status == 1, "it can continue"
