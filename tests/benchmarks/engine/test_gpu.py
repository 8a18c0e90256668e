"""A run on a GPU host that may end at any moment, without the GPU: stored results, parts in their order, and the second call."""

from __future__ import annotations

import json
import random
import sys
import tarfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from benchmarks.__main__ import main
from benchmarks.engine import gpu
from benchmarks.engine.gpu import END_SECONDS, LIMIT_SECONDS, NO_TIME_LEFT, RUNS, WELL, Part, archived, parts, run_part, run_parts
from benchmarks.engine.records import FILE, Store
from benchmarks.engine.score import agrees, spread
from benchmarks.engine.subject import SHAPES, SMALL, random_decoder, subject
from tests.checkpoints import make_checkpoint
from tests.engine.depth import seeds
from tests.processes import wait_until
from tests.shards import shards


class Killed(BaseException):
    """The process ends here."""


class Clock:
    """Seconds that pass only where work says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def program(store: Store, clock: Clock, kill_at: float) -> list[str]:
    """Twelve measurements of a few seconds each; returns those that were made. Ends by :class:`Killed` at ``kill_at``."""
    made = []

    def work(key: str, seconds: float) -> dict[str, float]:
        clock.now += seconds
        if clock.now >= kill_at:
            raise Killed
        made.append(key)
        return {"value": seconds}

    for place in range(12):
        key = f"rate {place}"
        assert store.measure(key, 4.0, lambda key=key, place=place: work(key, 2.0 + place % 3)) in (
            None,
            {"value": 2.0 + place % 3},
        )
    return made


@pytest.mark.parametrize("seed", range(30))
def test_a_store_survives_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    made: list[str] = []
    for call in range(40):
        store = Store(tmp_path, resume=call > 0, limit=20.0, clock=clock)
        before = set(store.results)
        end = clock.now + 20.0
        try:
            made += program(store, clock, clock.now + rng.uniform(1, 40))
            assert clock.now <= end, "it stops in time"
            if not store.left_out:
                break
        except Killed:
            made += [key for key in store.results if key not in before]
            if rng.random() < 0.5:  # killed in the middle of a line
                with (tmp_path / FILE).open("a") as file:
                    file.write('{"key": "rate 99", "resu')
    whole = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [entry["key"] for entry in whole] == made, "each was measured once"
    assert set(made) == {f"rate {place}" for place in range(12)}


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    Store(tmp_path).measure("a", 0, lambda: 1)
    assert Store(tmp_path, resume=True).results == {"a": 1}
    assert Store(tmp_path).results == {}
    assert (tmp_path / FILE).read_bytes() == b""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", seeds(quick=2, slow=5, deep=20))
def test_calls_that_are_killed_are_completed_by_later_ones(tmp_path: Path, seed: int, name: str) -> None:
    rng, clock = random.Random(seed), Clock()
    todo = parts(name, tmp_path)
    needed = {part.name: rng.uniform(20, 2 * part.seconds) for part in todo}
    runs: list[tuple[str, bool]] = []

    def start(part: Part, log: Path, seconds: float, again: bool) -> str:
        """As :func:`run_part`: a part that resumes goes on where it was."""
        runs.append((part.name, again))
        if rng.random() < 0.15:
            clock.now += rng.uniform(0, seconds)
            raise Killed
        spent = min(seconds, needed[part.name])
        clock.now += spent
        log.write_text(f"{part.name}\n")
        if not part.resumes:
            return WELL if rng.random() < 0.5 else "exit code 1"
        needed[part.name] -= spent
        return WELL if needed[part.name] <= 0 else "incomplete"

    for call in range(60):
        begun = clock.now
        try:
            state = run_parts(todo, tmp_path, LIMIT_SECONDS, resume=call > 0, clock=clock, start=start)
        except Killed:
            continue
        finally:
            assert clock.now - begun <= LIMIT_SECONDS + 1e-6
            if (tmp_path / "summary.json").exists():
                assert json.loads((tmp_path / "summary.json").read_text())["parts"]
        if all(part["ended"] == WELL or part["ended"] == "exit code 1" for part in state.values()):
            break
    assert set(state) == {part.name for part in todo}
    assert runs[0][0] == todo[0].name
    assert json.loads((tmp_path / "summary.json").read_text())["parts"] == state


SECONDS = {"a": [110, 70, 70, 80, 80, 120, 90], "b": [60, 80, 80, 190, 100, 60, 60]}
"""Seconds of the parts of the runs."""


@pytest.mark.parametrize("name", RUNS)
def test_two_calls_have_time_for_all(tmp_path: Path, name: str) -> None:
    """Each ends within the ten minutes that a command may take, and both together within twelve minutes less the installation."""
    todo = parts(name, tmp_path)
    assert LIMIT_SECONDS + END_SECONDS <= 540
    assert sum(part.seconds for part in todo) <= 2 * LIMIT_SECONDS
    assert len({part.name for part in todo}) == len(todo)
    if name in SECONDS:
        assert [part.seconds for part in todo] == SECONDS[name]
        assert sum(SECONDS[name]) <= 12 * 60 - 90
    assert all(
        part.arguments[part.arguments.index("--models") + 1] == str(tmp_path / "models")
        for part in todo
        if "score" in part.arguments
    )


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(settings.get_current_profile_name() != "deep", reason="takes 20 minutes; --hypothesis-profile=deep runs it")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_tiny_models_measures_every_part(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, in processes of their own; a busy machine with two cores gets more time."""
    slower = [replace(part, seconds=300.0) for part in parts(name, tmp_path, quick=True)]
    monkeypatch.setattr(gpu, "parts", lambda *_, **__: slower)
    assert main(["gpu", "--run", name, "--quick", "--out", str(tmp_path), "--limit", "3000"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*summary["parts"]] == [part.name for part in slower]
    assert summary["not_reached"] == []
    assert all(json.loads(part["last_line"]) for part in summary["parts"].values())


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


def test_parts_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chosen: list[Part] = []
    monkeypatch.setattr(gpu, "run_parts", lambda todo, *_, **__: chosen.extend(todo) or {})
    command = ["gpu", "--run", "b", "--quick", "--out", str(tmp_path)]
    assert main([*command, "--only", "accuracy", "step"]) == 0
    assert [part.name for part in chosen] == ["step", "accuracy"]
    with pytest.raises(SystemExit):
        main([*command, "--only", "kernels"])
    assert "run b has no part kernels; it has step, online" in capsys.readouterr().err


def test_a_folder_has_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"run": "a", "parts": {}}')
    assert main(["gpu", "--run", "b", "--quick", "--continue", "--out", str(tmp_path)]) == 1
    assert "has run a; continue that, or name another folder" in capsys.readouterr().err


def test_a_call_that_continues_runs_what_failed_after_what_did_not_begin(tmp_path: Path) -> None:
    clock, runs = Clock(), []
    ends = {"tests": "out of time after 9 s", "offline": "exit code 1", "online": "incomplete"}
    todo = [Part(name, [name], 50, resumes=name != "tests") for name in (*ends, "kernels", "length")]

    def start(part: Part, log: Path, seconds: float, again: bool) -> str:
        runs.append(part.name)
        clock.now += 50
        return ends.get(part.name, WELL)

    run_parts(todo, tmp_path, 150.0, clock=clock, start=start)
    assert runs == ["tests", "offline", "online"]
    runs.clear()
    run_parts(todo, tmp_path, 200.0, resume=True, clock=clock, start=start)
    assert runs == ["online", "kernels", "length", "offline"]


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


def test_a_part_that_leaves_something_out_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.py").write_text("import json, sys; print(json.dumps({'left_out': sys.argv[3:], 'argv': sys.argv[1:]}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part, log = Part("p", ["part"], 30), tmp_path / "p.txt"
    assert run_part(part, log, 30, False) == WELL
    assert json.loads(log.read_text())["argv"] == ["--limit", "22"]
    assert run_part(part, log, 30, True) == "incomplete"
    assert len(log.read_text().splitlines()) == 2


def test_differences_in_few_bits_are_judged_by_most_of_them() -> None:
    rng = np.random.default_rng(0)
    rounding = [abs(rng.normal(0, 0.027, 320)).tolist() for _ in range(1000)]
    assert all(agrees(spread(values), 0.1, exact=False) for values in rounding)
    assert 10 < sum(not agrees(spread(values), 0.1, exact=True) for values in rounding) < 200, "the largest of many fails by chance"
    wrong = abs(rng.normal(0, 0.5, 320)).tolist()
    assert not agrees(spread(wrong), 0.1, exact=False)
    found = spread(rounding[0])
    assert found["p50"] < found["rms"] < found["p90"] < found["p99"] <= found["max"]
    assert found["values"] == 320


@pytest.mark.slow
def test_a_benchmark_without_time_is_completed_by_a_second_call(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = make_checkpoint(tmp_path / "model", "qwen3"), tmp_path / "out"

    def call(*options: str) -> dict:
        assert main(["score", "--model", str(model), "--repeats", "1", "--out", str(out), *options]) == 0
        return json.loads((out / "summary.json").read_text())

    def killed(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.engine.score.Transformers", killed)
        with pytest.raises(Killed):
            call()
    assert (out / "results.jsonl").read_bytes() == b""
    assert call("--limit", "0")["left_out"] == ["comparison", "queued"]
    complete = call("--continue")
    assert complete["left_out"] == complete["disagree"] == []
    assert complete["differences"]["values"] == 20
    assert complete["engine"]["attention"]["backend"] == "reference"
    assert complete["engine"]["steps"] > 0
    records = (out / "records.jsonl").read_text()
    again = call("--continue")
    assert again["ratio"] == complete["ratio"]
    assert (out / "records.jsonl").read_text() == records


def test_random_weights_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setitem(SHAPES, "small", replace(SMALL, num_layers=1, hidden_size=64, intermediate_size=64, vocab_size=300))
    monkeypatch.setattr(
        "benchmarks.engine.subject.random_decoder", lambda config, **_: made.append(config) or random_decoder(config)
    )
    for _ in range(2):
        with subject("small", None, "float32", models=tmp_path) as measured:
            assert measured.directory == tmp_path / "small-float32"
            assert (measured.directory / "tokenizer.json").is_file()
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small-float32"]
