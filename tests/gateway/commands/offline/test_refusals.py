"""Wrong usage, and errors that every row would have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import FakeEngine
from tests.gateway.commands.offline.conftest import Served, Yardstick, lines, write_texts
from tests.gateway.conftest import Start
from tests.processes import free_port


def the_one_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("yardstick: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embed", "--input", "none.jsonl", "--output", "o.jsonl"], "cannot read none.jsonl"),
        (["embed", "--input", "in.jsonl", "--output", "o.txt"], "o.txt does not end in .jsonl or .csv or .parquet"),
        (["embed", "--input", "in.jsonl", "--output", "in.jsonl"], "the same file"),
        (
            ["embed", "--input", "in.jsonl", "--output", "in.csv", "--text-column", "body"],
            "it has 'text'; name another with --text",
        ),
        (["embed", "--input", "in.jsonl", "--output", "o.csv", "--keep", "id"], "no column 'id' to keep"),
        (["rerank", "--input", "in.jsonl", "--output", "o.csv"], "no column 'query'"),
        (["rerank", "--input", "in.jsonl", "--output", "o.csv", "--query-column", "text"], "'documents' or 'document'"),
        (["score", "--labels", "Yes", "--input", "in.jsonl"], "--input needs --output"),
        (["score", "--labels", "Yes"], "either --items"),
        (["score", "--input", "in.jsonl", "--output", "o.csv"], "give --labels"),
        (["score", "--labels", "Yes", "--readout", "likelihood", "--input", "in.jsonl", "--output", "o.csv"], "without --labels"),
        (["score", "--readout", "likelihood", "--query", "q", "--items", "in.jsonl"], "--readout works only with --input"),
        (["score", "--labels", "Yes", "--items", "in.jsonl"], "--items needs --query"),
        (["score", "--labels", "Yes", "--input", "in.jsonl", "--output", "o.csv", "--sort"], "--sort works only with"),
        (["score", "--labels", "Yes", "--query", "q", "--items", "in.jsonl", "--keep", "x"], "--keep works only with --input"),
        (["batch", "--input", "in.csv", "--output", "o.jsonl"], "in.csv does not end in .jsonl"),
        (["embed", "--input", "in.jsonl", "--output", "o.jsonl", "--url", "127.0.0.1:8000"], "--url is '127.0.0.1:8000'"),
        (["embed", "--input", "in.jsonl", "--output", "o.jsonl", "--api-key", "ключ"], "--api-key"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    yardstick: Yardstick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in.jsonl", 2)
    given = arguments if "--url" in arguments else [*arguments, "--url", "http://127.0.0.1:9"]
    done = yardstick(*given)
    assert done.status == 2
    assert words in the_one_line(done.err)


def test_only_the_same_run_is_continued(embedder: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source, output = write_texts(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", embedder.url)
    assert yardstick("embed", *given).status == 0
    before = output.read_bytes()
    assert yardstick("embed", *given, "--concurrency", 3).status == 0, "the results do not depend on it"
    changed = yardstick("embed", *given, "--dimensions", 3)
    assert (changed.status, "begun with other options" in the_one_line(changed.err)) == (2, True)
    other = yardstick("rerank", *given, "--query-column", "text", "--document-column", "text")
    assert (other.status, "begun by `yardstick embed`" in the_one_line(other.err)) == (2, True)
    write_texts(source, 6)
    grown = yardstick("embed", *given)
    assert (grown.status, "the input has changed" in the_one_line(grown.err)) == (2, True)
    write_texts(source, 5)
    output.rename(tmp_path / "kept")
    gone = yardstick("embed", *given)
    assert (gone.status, "is gone" in the_one_line(gone.err)) == (2, True)
    (tmp_path / "kept").rename(output)
    (tmp_path / "out.jsonl.state.json").unlink()
    foreign = yardstick("embed", *given)
    assert (foreign.status, "belongs to no run" in the_one_line(foreign.err)) == (2, True)
    assert output.read_bytes() == before


def test_nobody_answering_stops_at_once(yardstick: Yardstick, tmp_path: Path) -> None:
    source, url = write_texts(tmp_path / "in.jsonl", 1000), f"http://127.0.0.1:{free_port()}"
    done = yardstick("embed", "--input", source, "--output", tmp_path / "out.jsonl", "--url", url)
    assert done.status == 1
    assert f"no answer from {url}" in the_one_line(done.err)
    assert lines(tmp_path / "out.jsonl") == []


def test_what_every_row_would_meet_stops_the_run(embedder: Served, reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", 1000)
    given = ("--input", source, "--output", tmp_path / "out.jsonl", "--url", embedder.url)
    assert "'other'" in the_one_line(yardstick("embed", *given, "--model", "other").err)
    (tmp_path / "out.jsonl.state.json").unlink()
    assert "`dimensions` is 500" in the_one_line(yardstick("embed", *given, "--dimensions", 500).err)
    (tmp_path / "out.jsonl.state.json").unlink()
    able = yardstick("embed", "--input", source, "--output", tmp_path / "out.jsonl", "--url", reranker.url)
    assert (able.status, "the server refused" in the_one_line(able.err)) == (1, True)
    labels = ("--query", "x", "--labels", "shoebox", "--item-column", "text")
    scored = yardstick("score", "--input", source, "--output", tmp_path / "scores.jsonl", "--url", reranker.url, *labels)
    assert (scored.status, "shoebox" in the_one_line(scored.err)) == (1, True)
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()


def test_a_missing_key_stops_the_run(start: Start, yardstick: Yardstick, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    assert yardstick("keys", "new", "me", "--file", keys).status == 0
    assert json.loads(keys.read_text())
    client = start(FakeEngine(), wait=False, api_keys_file=keys)
    done = yardstick(
        "embed", "--input", write_texts(tmp_path / "in.jsonl", 9), "--output", tmp_path / "o.csv", "--url", client.base_url
    )
    assert done.status == 1
    assert "--api-key or YARDSTICK_API_KEY" in the_one_line(done.err)
