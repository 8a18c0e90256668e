"""Order, concurrency, servers that are busy, restart or fail, wrong usage, and errors that every row would have."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngine, Running, served, stop
from tests.gateway.commands.conftest import (
    Done,
    Embeddings,
    Reply,
    Served,
    Yardstick,
    error,
    lines,
    the_one_line,
    write,
    write_texts,
)
from tests.gateway.conftest import Start
from tests.processes import free_port, wait_until
from yardstick_llm.gateway.commands import files


def expected(source: Path) -> list[dict[str, Any]]:
    found = enumerate(lines(source), start=1)
    return [{"row": row, "embedding": [len(line["text"]) / 8, 0.5], "error": None} for row, line in found]


@dataclass
class Embed:
    """``yardstick embed`` for a file of texts, on a server whose answers a test may replace."""

    server: Embeddings
    url: str
    yardstick: Yardstick
    source: Path
    output: Path

    def __call__(self, rows: int, *options: object) -> Done:
        write_texts(self.source, rows)
        return self.yardstick("embed", "--input", self.source, "--output", self.output, "--url", self.url, *options)

    @property
    def is_complete(self) -> bool:
        return lines(self.output) == expected(self.source)


@pytest.fixture
def embed(yardstick: Yardstick, tmp_path: Path) -> Iterator[Embed]:
    server = Embeddings()
    with served(server) as url:
        yield Embed(server, url, yardstick, tmp_path / "in.jsonl", tmp_path / "out.jsonl")


@pytest.mark.slow
def test_results_are_in_input_order_and_requests_bounded(embed: Embed) -> None:
    async def slow(_: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(random.uniform(0, 0.02))

    embed.server.before = slow
    done = embed(500, "--batch", 3, "--concurrency", 5)
    assert done.status == 0, done.err
    assert embed.is_complete
    assert embed.server.most_running == 5
    assert embed.server.texts != [line["text"] for line in lines(embed.source)], "requests overtook each other"


@pytest.mark.slow
def test_a_result_is_written_as_soon_as_those_before_it_are(embed: Embed) -> None:
    """A slow row delays the rows behind it, which are few, and no row before it."""
    sizes = list[int]()

    async def slow(server: Embeddings, texts: list[str]) -> None:
        if texts[0].startswith("50 "):
            requests = 0
            while server.requests != requests:  # until no further request comes
                requests = server.requests
                await asyncio.sleep(0.3)
            sizes.extend([len(lines(embed.output)), requests])

    embed.server.before = slow
    assert embed(200, "--batch", 1, "--concurrency", 4).status == 0
    written, requests = sizes
    assert written == 50
    assert 50 < requests <= 51 + 4 * 4
    assert embed.is_complete


@pytest.mark.slow
def test_429_is_waited_for_and_lowers_the_concurrency(embed: Embed) -> None:
    refused = [0]

    async def busy(server: Embeddings, texts: list[str]) -> Reply | None:
        if server.running > 3:
            refused[0] += 1
            return error(429, "full", retry_after_ms="20", retry_after="1")
        await asyncio.sleep(0.01)
        return None

    embed.server.before = busy
    assert embed(300, "--batch", 1, "--concurrency", 32).status == 0
    assert embed.is_complete
    assert 0 < refused[0] < 200, "a fixed concurrency of 32 would be refused most of the time"


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["1", "86400"])
def test_waiting_is_bounded_and_the_run_can_continue(embed: Embed, wait: str) -> None:
    """A wait beyond the bound, as for a daily quota, stops the run at once. No row fails for either."""

    async def full(server: Embeddings, texts: list[str]) -> Reply | None:
        return error(429, "come later", retry_after=wait) if int(texts[0].split()[0]) >= 64 else None

    embed.server.before = full
    started = time.monotonic()
    done = embed(200, "--retry-seconds", 2)
    assert (done.status, time.monotonic() - started < 20) == (1, True)
    assert re.search(r"wants \d+ s more \(HTTP status 429\)", done.err)
    assert lines(embed.output) == expected(embed.source)[:64]
    embed.server.before = None
    again = embed(200, "--retry-seconds", 2)
    assert (again.status, "continuing after row 64" in again.err) == (0, True)
    assert embed.is_complete


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for(yardstick: Yardstick, tmp_path: Path) -> None:
    """Also by requests that began before others succeeded, and that lose several connections before the server is back."""
    port, servers = free_port(), list[Running]()
    first, second = Embeddings(), Embeddings()
    ends = threading.Event()

    async def slow(server: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(0.1)
        if server is first and int(texts[0].split()[0]) % 4 == 0:
            while not ends.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.01)
            raise ConnectionError

    first.before = second.before = slow
    servers.append(Running(first, port))

    def restart() -> None:
        wait_until(lambda: first.requests > 20)
        ends.set()
        stop(servers[:1])
        time.sleep(2.5)
        servers.append(Running(second, port))

    restarting = threading.Thread(target=restart)
    restarting.start()
    source, output = write_texts(tmp_path / "in.jsonl", 250), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", f"http://127.0.0.1:{port}", "--batch", 1, "--concurrency", 16)
    done = yardstick("embed", *given)
    restarting.join()
    stop(servers[1:])
    assert done.status == 0, done.err
    assert lines(output) == expected(source)
    assert second.requests > 0


@pytest.mark.parametrize(("status", "requests"), [(500, 1), pytest.param(502, 3, marks=pytest.mark.slow), (429, 1), (503, 1)])
def test_errors_without_a_remedy_fail_one_row(embed: Embed, status: int, requests: int) -> None:
    """429 and 503 are sent again only with Retry-After."""
    asked = [0]

    async def fail(server: Embeddings, texts: list[str]) -> Reply | None:
        if "2 xx" not in texts:
            return None
        asked[0] += 1
        return error(status, "no luck")

    embed.server.before = fail
    assert embed(5, "--batch", 1).status == 1
    assert [row["error"] for row in lines(embed.output)] == [None, None, f"no luck (HTTP status {status}, told)", None, None]
    assert asked == [requests]


@pytest.mark.slow
@pytest.mark.parametrize("reply", [error(503, "later", retry_after_ms="100"), None])
def test_a_row_that_alone_is_never_accepted_fails(embed: Embed, reply: Reply | None) -> None:
    """None: its connection breaks."""

    async def refuse(server: Embeddings, texts: list[str]) -> Reply | None:
        await asyncio.sleep(0.02)
        if "2 xx" in texts and reply is None:
            raise ConnectionError
        return reply if "2 xx" in texts else None

    embed.server.before = refuse
    done = embed(100, "--batch", 1, "--concurrency", 2, "--retry-seconds", 2 if reply else 60)
    assert done.status == 1
    (failed,) = [row for row in lines(embed.output) if row["error"]]
    assert failed["row"] == 3, done.err
    assert failed["error"].startswith("not accepted within" if reply else "no answer in ")


@pytest.mark.parametrize("answer", [{"data": []}, {"data": [{"index": 0}]}, "text", {}])
def test_answers_that_make_no_sense_fail_their_rows(embed: Embed, answer: Any) -> None:
    async def nonsense(server: Embeddings, texts: list[str]) -> Reply:
        return 200, {}, answer

    embed.server.before = nonsense
    assert embed(2).status == 1
    assert all(row["error"].startswith("the answer cannot be used: ") for row in lines(embed.output))


def test_a_line_is_printed_now_and_then_where_there_is_no_terminal(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(server: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(0.05)

    embed.server.before = slow
    monkeypatch.setattr("yardstick_llm.gateway.commands.client.LINE_SECONDS", 0.1)
    *progress, _ = embed(100, "--batch", 5, "--concurrency", 1).err.splitlines()
    assert len(progress) > 3
    assert all(re.fullmatch(r"yardstick embed: \d+ %, \d+ rows, 0 failed", line) for line in progress)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'"no end\n', "in.csv, line 101: not CSV"), (b"caf\xe9\n", "in.csv, line 101: not UTF-8")],
)
def test_rows_before_a_broken_line_of_csv_are_written(embed: Embed, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "in.csv").write_bytes(b"text\n" + b"abc\n" * 99 + content)
    done = embed(0, "--input", tmp_path / "in.csv")
    assert (done.status, words in done.err) == (1, True)
    assert len(lines(embed.output)) == 99


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embed", "--input", "none.jsonl", "--output", "o.jsonl"], "cannot read none.jsonl: no such file"),
        (["embed", "--input", "in.txt", "--output", "o.jsonl"], "in.txt does not end in .jsonl, .csv or .parquet"),
        (["embed", "--input", "empty.jsonl", "--output", "o.jsonl"], "empty.jsonl has no rows"),
        (["embed", "--input", "empty.csv", "--output", "o.jsonl"], "empty.csv has no header"),
        (["embed", "--input", "broken.jsonl", "--output", "o.jsonl"], "broken.jsonl, line 1: not a JSON object"),
        (["embed", "--input", "broken.parquet", "--output", "o.jsonl"], "cannot read broken.parquet"),
        (["embed", "--input", "in.jsonl", "--output", "o.txt"], "o.txt does not end in .jsonl or .csv or .parquet"),
        (["embed", "--input", "in.jsonl", "--output", "in.jsonl"], "the same file"),
        (["embed", "--input", "in.jsonl", "--output", "in.csv", "--text-column", "body"], "no column 'body'; it has 'text'"),
        (["embed", "--input", "in.jsonl", "--output", "o.csv", "--keep", "id"], "no column 'id' to keep"),
        (["rerank", "--input", "in.jsonl", "--output", "o.csv"], "no column 'documents' or 'document'"),
        (["rerank", "--input", "in.jsonl", "--output", "o.csv", "--document-column", "text"], "no column 'query'"),
        (["score", "--labels", "Yes", "--input", "in.jsonl"], "--input needs --output"),
        (["score", "--labels", "Yes"], "either --items"),
        (["score", "--input", "in.jsonl", "--output", "o.csv"], "give --labels"),
        (["score", "--labels", "Yes", "--readout", "likelihood", "--input", "in.jsonl", "--output", "o.csv"], "without --labels"),
        (["score", "--readout", "likelihood", "--query", "q", "--items", "in.jsonl"], "--readout works only with --input"),
        (["score", "--labels", "Yes", "--items", "in.jsonl"], "--items needs --query"),
        (["score", "--labels", "Yes", "--input", "in.jsonl", "--output", "o.csv", "--sort"], "--sort works only with"),
        (["score", "--labels", "Yes", "--query", "q", "--items", "in.jsonl", "--keep", "x"], "--keep works only with --input"),
        (["batch", "--input", "in.jsonl", "--output", "o.csv"], "o.csv does not end in .jsonl"),
        (["embed", "--input", "in.jsonl", "--output", "o.jsonl", "--url", "127.0.0.1:8000"], "--url is '127.0.0.1:8000'"),
        (["embed", "--input", "in.jsonl", "--output", "o.jsonl", "--api-key", "ключ"], "--api-key"),
        (["embed", "--input", "in.jsonl", "--output", "notes.jsonl"], "notes.jsonl exists and is no output of this command"),
        (["embed", "--input", "in.jsonl", "--output", "other.jsonl"], "other.jsonl exists and is no output of this command"),
        (["embed", "--input", "in.jsonl", "--output", "longer.jsonl"], "the output has 3 rows, and in.jsonl has 2"),
        (["embed", "--input", "in.jsonl", "--output", "other.csv"], "other.csv exists and is no output of this command"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    yardstick: Yardstick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in.jsonl", 2)
    contents = {
        "in.txt": "",
        "empty.jsonl": "\n",
        "empty.csv": "",
        "broken.jsonl": "{",
        "broken.parquet": "PAR1",
        "other.csv": "a,b",
    }
    for name, content in contents.items() | {("notes.jsonl", "remember"), ("other.jsonl", '{"row":1,"score":1,"error":null}\n')}:
        (tmp_path / name).write_text(content)
    (tmp_path / "longer.jsonl").write_text("".join(f'{{"row":{row},"embedding":[1],"error":null}}\n' for row in (1, 2, 3)))
    if "broken.parquet" in arguments:
        pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    given = arguments if "--url" in arguments else [*arguments, "--url", "http://127.0.0.1:9"]
    done = yardstick(*given)
    assert done.status == 2
    assert words in the_one_line(done)
    assert (tmp_path / "notes.jsonl").read_text() == "remember"


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").touch()
    with pytest.raises(files.WrongUsage, match=r"pip install 'yardstick-llm\[parquet\]'"):
        files.open_source(tmp_path / "in.parquet")


def test_nobody_answering_stops_at_once(embed: Embed) -> None:
    embed.url = f"http://127.0.0.1:{free_port()}"
    done = embed(1000)
    assert done.status == 1
    assert f"no answer from {embed.url}" in the_one_line(done)
    assert lines(embed.output) == []


@pytest.mark.slow
def test_what_every_row_would_meet_stops_the_run(embedder: Served, reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", 1000)
    given = ("--input", source, "--output", tmp_path / "out.jsonl", "--url", embedder.url)
    assert "'other'" in the_one_line(yardstick("embed", *given, "--model", "other"))
    assert "`dimensions` is 500" in the_one_line(yardstick("embed", *given, "--dimensions", 500))
    able = yardstick("embed", "--input", source, "--output", tmp_path / "out.jsonl", "--url", reranker.url)
    assert (able.status, "the server refused" in the_one_line(able)) == (1, True)
    labels = ("--query", "x", "--labels", "shoebox", "--item-column", "text")
    scored = yardstick("score", "--input", source, "--output", tmp_path / "scores.jsonl", "--url", reranker.url, *labels)
    assert (scored.status, "shoebox" in the_one_line(scored)) == (1, True)
    assert lines(tmp_path / "out.jsonl") == []


def test_a_missing_key_stops_the_run(start: Start, yardstick: Yardstick, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    assert yardstick("keys", "new", "me", "--file", keys).status == 0
    client = start(FakeEngine(), wait=False, api_keys_file=keys)
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    done = yardstick("embed", "--input", source, "--output", tmp_path / "o.csv", "--url", client.base_url)
    assert done.status == 1
    assert "--api-key or YARDSTICK_API_KEY" in the_one_line(done)
