"""A run on a GPU host that may end at any moment, without the GPU: stored results, parts in their order, and the second call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from argparse import ArgumentParser, Namespace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engine.gpu import LIMIT_SECONDS, NO_TIME_LEFT, RUNS, WELL, Part, archived, parts, run_part, run_parts
from tests.processes import wait_until
from tests.shards import BEGUN, ENGINES, FAILED, TESTS, run, shards


class Clock:
    """Seconds that pass only where work says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_run_names_what_it_did_not_reach(tmp_path: Path, name: str) -> None:
    """With parts that need all of their time, in two calls."""
    clock, todo, begun = Clock(), parts(name, tmp_path), list[str]()
    needed = {part.name: part.seconds for part in todo}

    def start(part: Part, log: Path, seconds: float, again: bool) -> str:
        begun.append(part.name)
        spent = min(seconds, needed[part.name])
        clock.now += spent
        needed[part.name] -= spent
        return "incomplete" if needed[part.name] else WELL

    state = run_parts(todo, tmp_path, LIMIT_SECONDS, clock=clock, start=start, about={"run": name})
    assert begun == [part.name for part in todo][: len(begun)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    left = [part.name for part in todo][len(begun) - 1 :]
    assert summary["run"] == name
    assert summary["not_reached"] == left
    assert {state[part]["ended"] for part in left[1:]} == {NO_TIME_LEFT}
    begun.clear()
    run_parts(todo, tmp_path, LIMIT_SECONDS, resume=True, clock=clock, start=start)
    assert sorted(begun) == sorted(left)
    assert json.loads((tmp_path / "summary.json").read_text())["not_reached"] == []
    assert clock.now <= 12 * 60 - 90


def test_the_last_part_that_is_left_may_take_all_the_time_that_is_left(tmp_path: Path) -> None:
    """In the first call, and in one that continues, where it is another part."""
    clock, todo, given = Clock(), [Part(name, [], 60) for name in ("first", "middle", "last")], list[tuple[str, float]]()

    def start(part: Part, log: Path, seconds: float, again: bool) -> str:
        given.append((part.name, seconds))
        clock.now += 50
        return WELL if part.name == "last" else "incomplete"

    run_parts(todo, tmp_path, 480, clock=clock, start=start)
    assert given == [("first", 60), ("middle", 60), ("last", 380)]
    given.clear()
    run_parts(todo, tmp_path, 480, resume=True, clock=clock, start=start)
    assert given == [("first", 60), ("middle", 430)]


def test_tests_on_a_gpu_compile_no_loops_for_a_cpu() -> None:
    """The plugin of their processes hides numba, which the host may have."""
    program = "import torch; torch.cuda.is_available = lambda: True; import tests.shards; from yardstick_llm.kernels import runtime"
    for hidden in (False, True):
        variables = {**os.environ, "TRITON_INTERPRET": "0"} | ({BEGUN: os.devnull} if hidden else {})
        command = [sys.executable, "-c", f"{program}; print(runtime.HAS_LOOPS)"]
        said = subprocess.run(command, env=variables, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
        assert said == f"{find_spec('numba') is not None and not hidden}\n"


def test_run_a_has_the_tests_of_every_kernel_on_the_device(tmp_path: Path) -> None:
    """Those that failed last come first."""
    words = parts("a", tmp_path)[0].arguments[1:]
    chosen = [name for name in shards() if not words or any(word in name for word in words)]
    files = (TESTS / "kernels").glob("test_*.py")
    assert {path.stem for path in files if ".to(device)" in path.read_text() or "device=device" in path.read_text()} <= {*chosen}
    assert chosen[: len(FAILED)] == [*FAILED]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its test runs there")
def test_a_run_says_why_tests_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    name = "engine, products in FP8"
    assert run(name, shards()[name]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "SKIPPED [1]" in line]
    assert said.startswith(f"{name}: ")
    assert said.endswith("needs an NVIDIA GPU")
    assert ENGINES.name in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_run_a_on_small_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its real program."""
    assert main(["gpu", "--run", "a", "--quick", "--out", str(tmp_path), "--only", "length", "--limit", "200"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: part["ended"] for name, part in summary["parts"].items()} == {"length": WELL}
    assert [*json.loads((tmp_path / "length/summary.json").read_text())["rows"]] == ["1", "4"]


class ParsedError(Exception):
    """The program has accepted its arguments."""


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_the_programs_of_a_run_accept_their_arguments(
    tmp_path: Path, name: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt option would be found only on a GPU."""
    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser, *given: Any) -> Namespace:
        parsed = parse(parser, *given)
        if parser.prog == "python -m benchmarks":  # which has yet to call the benchmark
            return parsed
        raise ParsedError

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    monkeypatch.setattr("benchmarks.__main__._restart_as_engine", lambda *_: None)
    for part in parts(name, tmp_path, quick=quick):
        module, *arguments = part.arguments
        arguments += ["--limit", "50", "--continue"] if part.resumes else []
        if module == "tests.shards":
            assert [word for word in arguments if not any(word in shard for shard in shards())] == []
            continue
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        program = partial(main, arguments) if module == "benchmarks" else import_module(module).main
        with pytest.raises(ParsedError):
            program()


def test_the_archive_is_whole_while_parts_write(tmp_path: Path) -> None:
    """It is written before the call ends, which may be killed, and has no models."""
    out, target = tmp_path / "run", tmp_path / "run.tar.gz"
    for name in ("models/m/model.safetensors", "online/results.jsonl", "online/latency.png"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)

    def names() -> list[str]:
        with tarfile.open(target) as archive:
            assert all(archive.extractfile(entry).read().decode() == entry.name.removeprefix("run/") for entry in archive)
            return archive.getnames()

    with archived(out, target, seconds=0.01):
        wait_until(target.exists)
        assert names() == ["run/online/latency.png", "run/online/results.jsonl"]
        (out / "kernels.txt").write_text("kernels.txt")
    assert names() == ["run/kernels.txt", "run/online/latency.png", "run/online/results.jsonl"]
    with archived(out, None):
        pass


def test_parts_end_well_fail_and_run_late(tmp_path: Path) -> None:
    def ended(*arguments: str, seconds: float = 30.0) -> str:
        return run_part(Part("p", arguments, 30, resumes=False), tmp_path / "p.txt", seconds, False)

    assert ended("platform") == WELL
    assert ended("no_such_module") == "exit code 1"
    assert "No module named no_such_module" in (tmp_path / "p.txt").read_text()
    assert ended("http.server", "0", seconds=0.5) == "out of time after 0 s"
