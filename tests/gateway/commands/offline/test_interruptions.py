"""Runs that end early, as real processes: Ctrl-C, kill -9, a full disk. And the memory of a long one."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes import served
from tests.gateway.commands.offline.conftest import Embeddings, Reply, error, lines, write_texts
from tests.processes import wait_until
from tests.warm import as_in_production

ROWS = 1500


async def some_fail(_: Embeddings, texts: list[str]) -> Reply | None:
    """Refuse each text with 13 letters, and answer slowly."""
    await asyncio.sleep(random.uniform(0, 0.02))
    return error(400, "too sad", param="input") if any(text.count("x") == 13 for text in texts) else None


def start(*arguments: object, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gateway.cli", "embed", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=before)


def finished(*arguments: object, before: Callable[[], None] | None = None) -> tuple[int, str]:
    with start(*arguments, before=before) as process:
        _, err = process.communicate(timeout=100)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGKILL, "jsonl"),
        pytest.param(signal.SIGKILL, "parquet", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "jsonl", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "csv", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_after_the_last_complete_row(tmp_path: Path, number: signal.Signals, ending: str) -> None:
    source = write_texts(tmp_path / "in.jsonl", ROWS)
    if ending == "parquet":
        source = as_parquet(source)
    server = Embeddings(some_fail)
    with served(server) as url:
        whole, output = tmp_path / f"whole.{ending}", tmp_path / f"out.{ending}"
        assert finished("--input", source, "--output", whole, "--url", url, "--batch", 8)[0] == 1
        given = ("--input", source, "--output", output, "--url", url, "--batch", 8)
        growing = output if ending == "jsonl" else tmp_path / f"out.{ending}.part.jsonl"
        for part in (1, 2):
            with start(*given) as process:
                wait_until(lambda: growing.exists() and growing.stat().st_size > 20_000 * part, 60)  # noqa: B023 - used at once
                process.send_signal(number)
                _, err = process.communicate(timeout=30)
            assert process.returncode == (-number if number == signal.SIGKILL else 130), err
            if number != signal.SIGKILL:
                assert [line for line in err.splitlines() if not line.startswith("continuing")] == [
                    "yardstick: interrupted; the same command continues the run"
                ]
            if part == 1:
                with growing.open("ab") as stream:
                    stream.write(b'{"row":')  # as a kill during a write leaves it
        before, asked = growing.read_bytes(), server.requests
        status, err = finished(*given)
        assert status == 1
        assert "continuing after row" in err
        assert server.requests - asked < 2 * ROWS / 8
        if ending == "jsonl":
            assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        assert output.read_bytes() == whole.read_bytes()
        if ending == "parquet":
            rows = pytest.importorskip("pyarrow.parquet").read_table(output).to_pydict()["row"]
            assert rows == [row for row in range(1, ROWS + 1) if (row - 1) % 50 != 13]
        assert Path(f"{output}.failed.jsonl").read_bytes() == Path(f"{whole}.failed.jsonl").read_bytes()
    names = {f"out.{ending}", f"out.{ending}.failed.jsonl", f"out.{ending}.state.json"}
    assert {path.name for path in tmp_path.glob("*out*")} == names


def as_parquet(source: Path) -> Path:
    """Write the rows of ``source`` in several row groups."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(lines(source)), source.with_suffix(".parquet"), row_group_size=400)
    return source.with_suffix(".parquet")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_continues(tmp_path: Path) -> None:
    source, output = write_texts(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    with served(Embeddings()) as url:
        given = ("--input", source, "--output", output, "--url", url)
        status, err = finished(*given, before=small_disk)
        assert (status, len(err.splitlines())) == (1, 1)
        assert f"cannot write {output}: file too large; the same command continues" in err
        kept = lines(output)
        assert 0 < len(kept) < ROWS
        assert finished(*given)[0] == 0
        assert lines(output)[: len(kept)] == kept
        assert [row["row"] for row in lines(output)] == [*range(1, ROWS + 1)]


def peak_bytes(*arguments: object) -> int:
    """The most memory of a run, which must succeed. The kernel's count for a child (ru_maxrss) would include its parent's."""
    peak = 0
    with as_in_production(), start(*arguments) as process:
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
        for rows in (5_000, 50_000):
            source, output = write_texts(tmp_path / f"{rows}.jsonl", rows), tmp_path / f"{rows}-out.jsonl"
            peaks.append(peak_bytes("--input", source, "--output", output, "--url", url))
            with output.open(encoding="utf-8") as stream:
                assert all(json.loads(line)["row"] == row for row, line in enumerate(stream, start=1))
                assert json.loads(output.read_bytes()[-200:].splitlines()[-1])["row"] == rows
    print(f"peaks of {peaks} bytes")
    assert peaks[0] > 20 << 20, "this is the program's own memory"
    assert peaks[1] - peaks[0] < 8 << 20


@pytest.mark.slow
def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    async def slow(_: Embeddings, texts: list[str]) -> None:
        await asyncio.sleep(0.05)

    source = write_texts(tmp_path / "in.jsonl", 200)
    terminal, end = pty.openpty()
    with served(Embeddings(slow)) as url:
        arguments = ["embed", "--input", source, "--output", tmp_path / "o.jsonl", "--url", url, "--batch", 5, "--concurrency", 1]
        command = [sys.executable, "-m", "gateway.cli", *map(str, arguments)]
        variables = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(command, stderr=end, env=variables) as process:
            os.close(end)
            shown = b""
            with suppress(OSError):  # the terminal has no other end any more
                while part := os.read(terminal, 4096):
                    shown += part
        os.close(terminal)
    assert process.returncode == 0
    assert b"yardstick embed" in shown
    assert "━".encode() in shown
    assert re.search(rb"\b[1-9]\d* rows, 0 failed", shown)


@pytest.mark.slow
def test_half_a_million_names_are_compared_in_bounded_memory() -> None:
    program = """
import resource, sys
from gateway.commands.offline.rows import Row
from gateway.commands.offline.tasks.duplicates import first_duplicate
rows = lambda: (Row(number, number, 0, 0, {"custom_id": f"request-{number}"}) for number in range(500_000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert first_duplicate(rows, lambda row: row.fields["custom_id"]) is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert int(done.stdout) < 24 << 10, "KiB: the table of 16 MiB and names that share a bit"
