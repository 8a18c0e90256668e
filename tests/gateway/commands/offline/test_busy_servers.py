"""Order, concurrency, and servers that are busy, restart or fail."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Running, served, stop
from tests.gateway.commands.offline.conftest import Embeddings, Reply, Yardstick, error, lines, write_texts
from tests.processes import free_port, wait_until


def expected(source: Path) -> list[dict[str, Any]]:
    return [{"row": row, "embedding": [len(line["text"]) / 8, 0.5]} for row, line in enumerate(lines(source), start=1)]


def test_results_are_in_input_order_and_requests_bounded(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    server, url = embeddings

    async def slow(_: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(random.uniform(0, 0.02))

    server.before = slow
    source, output = write_texts(tmp_path / "in.jsonl", 500), tmp_path / "out.jsonl"
    done = yardstick("embed", "--input", source, "--output", output, "--url", url, "--batch", 3, "--concurrency", 5)
    assert done.status == 0, done.err
    assert lines(output) == expected(source)
    assert server.most_running == 5
    assert server.texts != [line["text"] for line in lines(source)], "requests overtook each other"


@pytest.mark.slow
def test_a_result_is_written_as_soon_as_those_before_it_are(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    """A slow row delays the rows behind it, which are few, and no row before it."""
    server, url = embeddings
    output, sizes, release = tmp_path / "out.jsonl", list[int](), threading.Event()

    async def slow(server: Embeddings, texts: list[str]) -> None:
        if texts[0].startswith("50 "):
            requests = 0
            while server.requests != requests:  # until no further request comes
                requests = server.requests
                await asyncio.sleep(0.3)
            sizes.extend([len(lines(output)), requests])
            release.set()

    server.before = slow
    source = write_texts(tmp_path / "in.jsonl", 1000)
    given = ("--input", source, "--output", output, "--url", url, "--batch", 1, "--concurrency", 4)
    assert yardstick("embed", *given).status == 0
    written, requests = sizes
    assert written == 50
    assert 50 < requests <= 51 + 4 * 4
    assert lines(output) == expected(source)


def test_429_is_waited_for_and_lowers_the_concurrency(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    server, url = embeddings
    refused, running = [0], [0]

    async def busy(server: Embeddings, texts: list[str]) -> Reply | None:
        if server.running > 3:
            refused[0] += 1
            return error(429, "full", retry_after_ms="20", retry_after="1")
        running[0] += 1
        await asyncio.sleep(0.01)
        return None

    server.before = busy
    source, output = write_texts(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", url, "--batch", 1, "--concurrency", 32)
    assert yardstick("embed", *given).status == 0
    assert lines(output) == expected(source)
    assert 0 < refused[0] < 200, "a fixed concurrency of 32 would be refused most of the time"


@pytest.mark.slow
def test_waiting_is_bounded_and_the_run_can_continue(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    server, url = embeddings

    async def full(server: Embeddings, texts: list[str]) -> Reply | None:
        return error(503, "not ready", retry_after="1") if texts[0].startswith("64 ") else None

    server.before = full
    source, output = write_texts(tmp_path / "in.jsonl", 200), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", url, "--retry-seconds", 2)
    started = time.monotonic()
    done = yardstick("embed", *given)
    assert (done.status, time.monotonic() - started < 20) == (1, True)
    assert "HTTP status 503" in done.err
    assert lines(output) == expected(source)[:64]
    server.before = None
    again = yardstick("embed", *given)
    assert (again.status, "continuing after row 64" in again.err) == (0, True)
    assert lines(output) == expected(source)


def test_a_wait_that_is_too_long_stops_the_run_at_once(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    """As for a daily quota: no row fails for it."""
    server, url = embeddings

    async def spent(server: Embeddings, texts: list[str]) -> Reply | None:
        await asyncio.sleep(random.uniform(0, 0.02))
        return error(429, "come tomorrow", retry_after="86400") if server.requests > 40 else None

    server.before = spent
    source, output = write_texts(tmp_path / "in.jsonl", 200), tmp_path / "out.jsonl"
    done = yardstick("embed", "--input", source, "--output", output, "--url", url, "--batch", 1)
    assert done.status == 1
    assert re.search(r"wants \d{5,6} s more \(HTTP status 429\)", done.err)
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()
    assert lines(output) == expected(source)[: len(lines(output))] != []


def test_rows_before_a_broken_line_of_csv_are_written(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path
) -> None:
    _, url = embeddings
    (tmp_path / "in.csv").write_text("text\n" + "abc\n" * 99 + '"no end\n')
    output = tmp_path / "out.jsonl"
    done = yardstick("embed", "--input", tmp_path / "in.csv", "--output", output, "--url", url)
    assert (done.status, "in.csv, line 101: not CSV" in done.err) == (1, True)
    assert len(lines(output)) == 99


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
        time.sleep(4)
        servers.append(Running(second, port))

    restarting = threading.Thread(target=restart)
    restarting.start()
    source, output = write_texts(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    given = ("--input", source, "--output", output, "--url", f"http://127.0.0.1:{port}", "--batch", 1, "--concurrency", 16)
    done = yardstick("embed", *given)
    restarting.join()
    stop(servers[1:])
    assert done.status == 0, done.err
    assert lines(output) == expected(source)
    assert second.requests > 0


@pytest.mark.parametrize(("status", "requests"), [(500, 1), pytest.param(502, 3, marks=pytest.mark.slow), (429, 1), (503, 1)])
def test_errors_without_a_remedy_fail_one_row(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path, status: int, requests: int
) -> None:
    """429 and 503 are sent again only with Retry-After."""
    server, url = embeddings
    asked = [0]

    async def fail(server: Embeddings, texts: list[str]) -> Reply | None:
        if "2 xx" not in texts:
            return None
        asked[0] += 1
        return error(status, "no luck")

    server.before = fail
    source, output = write_texts(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    assert yardstick("embed", "--input", source, "--output", output, "--url", url, "--batch", 1).status == 1
    (failed,) = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert (failed["row"], failed["status"], failed["code"], failed["error"]) == (3, status, "told", "no luck")
    assert [row["row"] for row in lines(output)] == [1, 2, 4, 5]
    assert asked == [requests]


@pytest.mark.slow
@pytest.mark.parametrize("reply", [error(503, "later", retry_after_ms="100"), None])
def test_a_row_that_alone_is_never_accepted_fails(yardstick: Yardstick, tmp_path: Path, reply: Reply | None) -> None:
    """None: its connection breaks."""

    async def refuse(server: Embeddings, texts: list[str]) -> Reply | None:
        await asyncio.sleep(0.02)
        if "2 xx" not in texts:
            return None
        if reply is None:
            raise ConnectionError
        return reply

    with served(Embeddings(refuse)) as url:
        source, output = write_texts(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl"
        given = ("--input", source, "--output", output, "--url", url, "--batch", 1, "--concurrency", 2, "--retry-seconds", 3)
        done = yardstick("embed", *given)
    assert done.status == 1
    failed = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert [row["row"] for row in failed] == [3], done.err
    assert failed[0]["error"].startswith("not accepted within" if reply else "no answer in ")
    assert len(lines(output)) == 99


@pytest.mark.parametrize("answer", [{"data": []}, {"data": [{"index": 0}]}, "text", {}])
def test_answers_that_make_no_sense_fail_their_rows(yardstick: Yardstick, tmp_path: Path, answer: Any) -> None:
    async def nonsense(server: Embeddings, texts: list[str]) -> Reply:
        return 200, {}, answer

    with served(Embeddings(nonsense)) as url:
        source, output = write_texts(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
        assert yardstick("embed", "--input", source, "--output", output, "--url", url).status == 1
    assert all("answer" in row["error"] for row in lines(tmp_path / "out.jsonl.failed.jsonl"))
    assert lines(output) == []


def test_a_line_is_printed_now_and_then_where_there_is_no_terminal(
    embeddings: tuple[Embeddings, str], yardstick: Yardstick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = embeddings

    async def slow(server: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(0.05)

    server.before = slow
    monkeypatch.setattr("gateway.commands.offline.progress.LINE_SECONDS", 0.1)
    source = write_texts(tmp_path / "in.jsonl", 100)
    given = ("--input", source, "--output", tmp_path / "o.jsonl", "--url", url, "--batch", 5, "--concurrency", 1)
    *progress, _ = yardstick("embed", *given).err.splitlines()
    assert len(progress) > 3
    assert all(line.startswith("yardstick embed: ") and " rows a second" in line for line in progress)
