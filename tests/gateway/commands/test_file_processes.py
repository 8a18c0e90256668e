"""Commands for files as real processes: Ctrl-C, kill -9, a full disk, memory, and servers that the command starts itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import served
from tests.gateway.commands.conftest import Embeddings, Reply, Yardstick, error, lines, write, write_texts
from tests.gateway.commands.test_cli_serve import parent_of
from tests.processes import alive, wait_until
from tests.warm import as_in_production

ROWS = 700
QUERY = "red running shoes"


async def some_fail(_: Embeddings, texts: list[str]) -> Reply | None:
    """Refuse each text with 13 letters, and answer slowly."""
    await asyncio.sleep(random.uniform(0, 0.02))
    return error(400, "too sad", param="input") if any(text.count("x") == 13 for text in texts) else None


def start(command: str, *arguments: object, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    given = [sys.executable, "-m", "yardstick_llm.gateway.cli", command, *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    return subprocess.Popen(given, stderr=subprocess.PIPE, text=True, preexec_fn=before, env=variables)


def finished(command: str, *arguments: object, before: Callable[[], None] | None = None) -> tuple[int, str]:
    with start(command, *arguments, before=before) as process:
        _, err = process.communicate(timeout=100)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "asks"), [("jsonl", signal.SIGINT), ("parquet", signal.SIGTERM)])
def test_a_run_continues_after_the_last_complete_row(
    yardstick: Yardstick, tmp_path: Path, ending: str, asks: signal.Signals
) -> None:
    source = write_texts(tmp_path / "in.jsonl", ROWS)
    if ending == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(lines(source)), source.with_suffix(".parquet"), row_group_size=400)
        source = source.with_suffix(".parquet")
    server = Embeddings(some_fail)
    with served(server) as url:
        whole, output = tmp_path / f"whole.{ending}", tmp_path / f"out.{ending}"
        assert yardstick("embed", "--input", source, "--output", whole, "--url", url, "--batch", 8).status == 1
        given = ("--input", source, "--output", output, "--url", url, "--batch", 8)
        slow = ("--concurrency", 2)  # no run ends before its signal
        growing = output if ending == "jsonl" else tmp_path / f"out.{ending}.part.jsonl"
        for part, number in ((1, signal.SIGKILL), (2, asks)):
            least = 6000 + (growing.stat().st_size if part == 2 else 0)
            with start("embed", *given, *slow) as process:
                wait_until(lambda: growing.exists() and growing.stat().st_size > least, 60)  # noqa: B023 - used at once
                process.send_signal(number)
                _, err = process.communicate(timeout=30)
            assert process.returncode == (-number if number == signal.SIGKILL else 130), err
            if number != signal.SIGKILL:
                told = [line for line in err.splitlines() if not line.startswith(("continuing", "yardstick embed: "))]  # progress
                assert told == ["yardstick: interrupted; the same command continues the run"]
            if part == 1:
                with growing.open("ab") as stream:
                    stream.write(b'{"row":')  # as a kill during a write leaves it
        before, asked = growing.read_bytes(), server.requests
        done = yardstick("embed", *given)
        assert (done.status, "continuing after row" in done.err) == (1, True), done.err
        assert server.requests - asked < 2 * ROWS / 8
        if ending == "jsonl":
            assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        assert output.read_bytes() == whole.read_bytes()
        if ending == "parquet":
            found = pytest.importorskip("pyarrow.parquet").read_table(output).to_pydict()
            assert found["row"] == [*range(1, ROWS + 1)]
            assert [row for row, problem in zip(found["row"], found["error"], strict=True) if problem] == [*range(14, ROWS, 50)]
    assert {path.name for path in tmp_path.glob("*out*")} == {f"out.{ending}"}


@pytest.mark.slow
def test_two_runs_do_not_write_to_one_output(tmp_path: Path) -> None:
    async def slow(_: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(0.1)

    source, output = write_texts(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with served(Embeddings(slow)) as url:
        given = ("--input", source, "--output", output, "--url", url, "--batch", 1)
        with start("embed", *given) as process:
            wait_until(lambda: output.exists() and output.stat().st_size > 0, 60)
            status, err = finished("embed", *given)
            process.send_signal(signal.SIGINT)
    assert (status, "another run writes to" in err) == (2, True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_continues(tmp_path: Path) -> None:
    source, output = write_texts(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    with served(Embeddings()) as url:
        given = ("--input", source, "--output", output, "--url", url)
        status, err = finished("embed", *given, before=small_disk)
        assert (status, len(err.splitlines())) == (1, 1)
        assert f"cannot write {output}: file too large; the same command continues" in err
        kept = lines(output)
        assert 0 < len(kept) < ROWS
        assert finished("embed", *given)[0] == 0
        assert lines(output)[: len(kept)] == kept
        assert [row["row"] for row in lines(output)] == [*range(1, ROWS + 1)]


def peak_bytes(*arguments: object) -> int:
    """The most memory of a run, which must succeed. The kernel's count for a child (ru_maxrss) would include its parent's."""
    peak = 0
    with as_in_production(), start("embed", *arguments) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                peak = max(peak, int(found[1]) * 1024)
            time.sleep(0.02)
        _, err = process.communicate()
    assert process.returncode == 0, err
    return peak


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    with served(Embeddings(remember=False)) as url:
        peaks = []
        for rows in (3_000, 13_000):
            source, output = write_texts(tmp_path / f"{rows}.jsonl", rows), tmp_path / f"{rows}-out.jsonl"
            peaks.append(peak_bytes("--input", source, "--output", output, "--url", url))
            assert json.loads(output.read_bytes()[-200:].splitlines()[-1])["row"] == rows
    print(f"peaks of {peaks} bytes")
    assert peaks[0] > 20 << 20, "this is the program's own memory"
    assert peaks[1] - peaks[0] < 5 << 20


def children_of(pid: int) -> list[int]:
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == pid]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the command", "the engine"])
def test_no_process_is_left(tmp_path: Path, victim: str) -> None:
    """Whether the command is interrupted, or its engine dies."""
    output = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [{"query": QUERY, "document": f"shoes {row}"} for row in range(20_000)])
    with as_in_production():
        process = start("rerank", "--input", source, "--output", output)
    try:
        wait_until(lambda: output.exists() and output.stat().st_size > 0, 60)
        children = children_of(process.pid)
        assert len(children) == 2
        (engine,) = [pid for pid in children if b"engine\0--model" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    finally:
        if victim == "the engine":
            os.kill(engine, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        with process:
            _, err = process.communicate(timeout=100)
    wait_until(lambda: not any(map(alive, children)), 20)
    if victim == "the engine":
        assert process.returncode == 1
        assert err.splitlines()[-1].startswith("yardstick: the engine has ended: killed by SIGKILL")
    else:
        assert process.returncode == 130, err
    assert [row["row"] for row in lines(output)] == [*range(1, len(lines(output)) + 1)]
