"""Offline runs that start an engine and a gateway of their own, as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.commands.offline.conftest import lines
from tests.gateway.commands.test_cli_serve import parent_of
from tests.processes import alive, wait_until
from tests.warm import as_in_production

QUERY = "red running shoes"
DOCUMENTS = ["crimson jogging sneakers", "scarlet running trainers", "green canvas tent", "red wool scarf"]


def start(command: str, *arguments: object) -> subprocess.Popen[str]:
    given = [sys.executable, "-m", "gateway.cli", command, *map(str, arguments)]
    return subprocess.Popen(given, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"})


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        _, err = process.communicate(timeout=100)
    return err


def children_of(pid: int) -> list[int]:
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == pid]


@pytest.mark.slow
def test_the_demo_model_reranks_a_file(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"query": QUERY, "document": document}) + "\n" for document in DOCUMENTS))
    process = start("rerank", "--input", source, "--output", output, "--keep", "document")
    err = finish(process)
    assert process.returncode == 0, err
    assert [line.split()[0] for line in err.splitlines()] == ["Loading", "Ready", str(output)], "no logs of the programs"
    best = sorted(lines(output), key=lambda row: -row["score"])
    assert {row["document"] for row in best[:2]} == set(DOCUMENTS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as stream:
        stream.writelines(json.dumps({"query": QUERY, "document": f"shoes {row}"}) + "\n" for row in range(20_000))
    with as_in_production():
        process = start("rerank", "--input", source, "--output", output)
    try:
        wait_until(lambda: output.exists() and output.stat().st_size > 0, 60)
        children = children_of(process.pid)
        assert len(children) == 2
    finally:
        process.send_signal(number)
        err = finish(process)
    wait_until(lambda: not any(map(alive, children)), 20)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert lines(output)[-1]["row"] == len(lines(output)) if number == signal.SIGINT else output.stat().st_size > 0


@pytest.mark.slow
def test_an_engine_that_dies_stops_the_run(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as stream:
        stream.writelines(json.dumps({"query": QUERY, "document": f"shoes {row}"}) + "\n" for row in range(20_000))
    with as_in_production():
        process = start("rerank", "--input", source, "--output", output)
    wait_until(lambda: output.exists() and output.stat().st_size > 0, 60)
    (engine,) = [pid for pid in children_of(process.pid) if b"engine\0--model" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(engine, signal.SIGKILL)
    err = finish(process)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("yardstick: the engine has ended: killed by SIGKILL")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    process = start("embed", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "o.jsonl", "--model", tmp_path / "none")
    err = finish(process)
    assert process.returncode == 1
    assert "none is not a directory; give a model directory or a hub id" in err.splitlines()[-1]
