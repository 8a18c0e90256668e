"""``yardstick rerank | score | embed | batch`` for a file, on a gateway before a fake engine."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.recipes import ray_data
from tests.gateway.commands.conftest import Served, Yardstick, lines, write, write_texts

PAIRS = [("red shoes", "running shoes"), ("red shoes", "a blue table"), ("fox", "the lazy dog"), ("fox", "a quick fox")]
CHAT = "/v1/chat/completions"


def ask(served: Served, path: str, **body: Any) -> Any:
    return httpx.post(served.url + path, json=body).raise_for_status().json()


def relevance(served: Served, query: str, documents: list[str]) -> list[float]:
    results = ask(served, "/v1/rerank", query=query, documents=documents)["results"]
    return [result["relevance_score"] for result in sorted(results, key=lambda result: result["index"])]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; cells of CSV that hold JSON are decoded."""
    if path.suffix == ".jsonl":
        return lines(path)
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet").read_table(path).to_pylist()
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            {name: json.loads(cell) if cell[:1] in "[{0123456789" and cell else cell or None for name, cell in row.items()}
            for row in csv.DictReader(stream)
        ]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the ending."""
    if path.suffix == ".jsonl":
        return write(path, rows)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path, row_group_size=2)
        return path
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(rows[0])
        writer.writerows([json.dumps(cell) if isinstance(cell, list) else cell for cell in row.values()] for row in rows)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_embed(embedder: Served, yardstick: Yardstick, tmp_path: Path, ending: str) -> None:
    texts = [f'red {number},\n"{number}"' for number in range(50)]
    source = write_table(tmp_path / f"in.{ending}", [{"id": number, "body": text} for number, text in enumerate(texts)])
    output = tmp_path / f"out.{ending}"
    options = ("--keep", "id", "--text-column", "body", "--dimensions", 3, "--model", "fake", "--batch", 7)
    done = yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, *options)
    assert done.status == 0, done.err
    assert f"{output} is complete: 50 results" in done.err
    direct = [entry["embedding"] for entry in ask(embedder, "/v1/embeddings", input=texts, dimensions=3)["data"]]
    found = rows_of(output)
    assert [(row["row"], row["id"], row["error"]) for row in found] == [(number + 1, number, None) for number in range(50)]
    assert all(row["embedding"] == pytest.approx(numbers, rel=1e-6) for row, numbers in zip(found, direct, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"in.{ending}", f"out.{ending}"]
    again = yardstick("embed", "--input", source, "--output", output, "--url", "http://127.0.0.1:9", *options)
    assert (again.status, "50 results" in again.err) == (0, True), "nothing is computed again"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_rerank_lists(reranker: Served, yardstick: Yardstick, tmp_path: Path, ending: str) -> None:
    rows = [{"query": query, "documents": [f"{document} {number}" for number in range(9)]} for query, document in PAIRS]
    source, output = write_table(tmp_path / f"in.{ending}", rows), tmp_path / f"out.{ending}"
    assert yardstick("rerank", "--input", source, "--output", output, "--url", reranker.url).status == 0
    assert [row["scores"] for row in rows_of(output)] == [relevance(reranker, **row) for row in rows]


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
    assert [line[column] for line in rows_of(output)] == [expected if column == "likelihoods" else expected[0]] * 3


def test_kept_columns_of_parquet_have_the_type_of_their_values(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    values = {"flag": [True, None], "count": [1, 2], "size": [1, 2.5], "name": ["a", "b"], "mixed": [1, "b"], "wide": [2**64, 1]}
    rows = [{"text": "red", **{name: column[row] for name, column in values.items()}} for row in range(2)] + [{"text": 5}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    kept = [word for name in values for word in ("--keep", name)]
    assert yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, *kept).status == 1
    table = parquet.read_table(output)
    types = ["int64", "bool", "int64", "double", "string", "string", "string", "list<element: float>", "string"]
    assert [str(field.type) for field in table.schema] == types
    found = table.to_pydict()
    assert (found["size"], found["mixed"]) == ([1.0, 2.5, None], ["1", "b", None])
    assert (found["embedding"][2], found["error"]) == (None, [None, None, "column 'text' is not a text"])


def test_rows_that_fail_are_rows_with_an_error(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    """A text that is too long fails alone, although it shares its request with others."""
    rows = [{"text": "a", "id": 1}, {"text": "red " * 4000, "id": 2}, {"id": 3}, {"text": 5}, {"text": "b"}]
    source = write(tmp_path / "in.jsonl", rows)
    with source.open("ab") as stream:
        stream.write(b'{oops\n\n[1]\n{"text": "caf\xe9"}\n' + b"[" * 100_000 + b'\n{"text": "c"}')
    output = tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", embedder.url, "--keep", "id")
    done = yardstick("embed", *given)
    assert done.status == 1
    assert "3 results, 7 rows failed (see the column error)" in done.err
    found = lines(output)
    assert [row["row"] for row in found] == [*range(1, 11)]
    assert [row["row"] for row in found if row["error"] is None] == [1, 5, 10]
    assert all((row["embedding"] is None) == (row["error"] is not None) for row in found)
    assert found[1]["id"] == 2
    assert "(HTTP status 400, context_length_exceeded)" in found[1]["error"]
    assert (found[2]["error"], found[3]["error"]) == ("no column 'text'", "column 'text' is not a text")
    assert [row["error"].partition(" (")[0] for row in found[5:9]] == [f"line {line}: not a JSON object" for line in (6, 8, 9, 10)]
    again = yardstick("embed", *given)
    assert (again.status, "3 results, 7 rows failed" in again.err) == (1, True)
    write(tmp_path / "lists.jsonl", [{"query": "q", "documents": wrong} for wrong in ("no list", [], [1])])
    assert (
        yardstick("rerank", "--input", tmp_path / "lists.jsonl", "--output", tmp_path / "o.csv", "--url", embedder.url).status == 1
    )
    problems = [
        "column 'documents' is not a list of texts",
        "column 'documents' is empty",
        "column 'documents' is not a list of texts",
    ]
    assert [row["error"] for row in rows_of(tmp_path / "o.csv")] == problems


def test_csv_is_read_as_spreadsheets_write_it(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes('\ufeffid,text\r\n1,"two\nlines, and a comma"\r\n\r\n2\r\n3,ü\r\n'.encode())
    assert yardstick("embed", "--input", source, "--output", output, "--url", embedder.url, "--keep", "text").status == 1
    first, short, last = rows_of(output)
    assert (first["text"], last["text"]) == ("two\nlines, and a comma", "ü")
    assert short["error"] == "line 5: 1 values, but the header has 2"


def request(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


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
    chat, rank, other, stream, away, get, no_id, again = lines(output)
    assert [answer["id"] for answer in lines(output)] == [f"batch_req_{row}" for row in range(1, 9)]
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("chat", None, 200)
    assert chat["response"]["request_id"]
    texts = {answer["choices"][0]["message"]["content"] for answer in (chat["response"]["body"], again["response"]["body"])}
    assert texts == {ask(reranker, CHAT, **said)["choices"][0]["message"]["content"]}
    assert len(rank["response"]["body"]["results"]) == 2
    assert (other["custom_id"], other["response"]["status_code"], other["error"]["code"]) == ("other", 404, "model_not_found")
    assert other["response"]["body"]["error"]["code"] == "model_not_found"
    assert (stream["response"], "`stream`" in stream["error"]["message"]) == (None, True)
    assert "//other.example" in away["error"]["message"]
    assert "only POST" in get["error"]["message"]
    assert (no_id["custom_id"], "custom_id" in no_id["error"]["message"]) == (None, True)
    assert yardstick("batch", "--input", source, "--output", output, "--url", reranker.url).status == 1, "it can continue"
    assert len(lines(output)) == 8


def test_an_input_may_grow(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source, output = write_texts(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", embedder.url)
    assert yardstick("embed", *given).status == 0
    before = output.read_bytes()
    write_texts(source, 9)
    grown = yardstick("embed", *given)
    assert (grown.status, grown.err.splitlines()[0]) == (0, "continuing after row 5")
    assert (len(lines(output)), output.read_bytes().startswith(before)) == (9, True)


def test_the_function_of_the_example_for_ray(reranker: Served) -> None:
    batch = {"query": [query for query, _ in PAIRS], "document": [document for _, document in PAIRS]}
    rerank = ray_data.Rerank(reranker.url, "fake")
    with rerank.client:
        scored = rerank(batch)
    assert scored.pop("score") == pytest.approx([relevance(reranker, query, [document])[0] for query, document in PAIRS])
    assert scored == batch
