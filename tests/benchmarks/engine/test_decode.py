"""The benchmark of many generations: its windows, its settings, its command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.engine import decode
from benchmarks.engine.decode import DRAFTS, LOGPROBS, Setting, measure, run
from benchmarks.engine.engines import Engine
from benchmarks.engine.subject import TINY, random_decoder
from benchmarks.engine.writing import PLAIN, Pair, Writing
from engine import wire


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Pair(random_decoder(TINY), None, "float32").engine(2048, 12, max_batched_tokens=32)


class Scripted:
    """A loop whose steps answer as told."""

    def __init__(self, *steps: list[wire.Delta]) -> None:
        self._steps = list(steps)

    def submit(self, request: wire.Generate) -> None:
        pass

    @property
    def idle(self) -> bool:
        return not self._steps

    def step(self) -> list[wire.Delta]:
        self.clock.now += 1.0
        return self._steps.pop(0)

    clock = SimpleNamespace(now=0.0)


def test_the_steady_part_is_between_the_last_begin_and_the_first_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def delta(name: str, *tokens: int, end: bool = False) -> wire.Delta:
        return wire.Delta(name, 0, list(tokens), finish="length" if end else None)

    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: Scripted.clock.now))
    loop = Scripted(
        [],
        [delta("a", 1)],
        [delta("a", 1), delta("b", 1)],
        [delta("a", 1), delta("b", 1)],
        [delta("a", 1, end=True), delta("b", 1)],
        [delta("b", 1, end=True)],
        [delta("late", 1, end=True)],
    )
    found = run(loop, [wire.Generate("a", [1, 2, 3], PLAIN)])  # type: ignore[arg-type]
    assert found == {
        "tokens": 9.0,
        "seconds": 7.0,
        "tokens_per_s": 9 / 7,
        "steady_tokens_per_s": 2.0,
        "steady_rows": 2.0,
        "steady_step_ms": 1000.0,
        "steady_context": 3 + (3 + 7) / 2 / 2,
    }


@pytest.mark.parametrize("name", LOGPROBS)
def test_every_setting_writes_all_texts(engine: Engine, name: str) -> None:
    found = measure(engine, Writing(6, 9, 10), 2, LOGPROBS[name])
    assert found["tokens"] == 6 * 2 * 10
    assert found["steady_rows"] == 12
    assert 9 < found["steady_context"] < 19


def test_settings_ask_for_what_they_are_called() -> None:
    for name, wanted in {"off": None, "chosen": 0, "top 5": 5}.items():
        asked = decode.requests(Writing(2, 4, 3), np.random.default_rng(0), TINY.vocab_size, 3, LOGPROBS[name])
        assert {request.logprobs for request in asked} == {wanted}
        assert {(request.sampling.n, request.sampling.top_k, request.sampling.ignore_eos) for request in asked} == {(3, 0, True)}
    mix = wire.Sampling(min_p=0.01, temperature=0.5, ignore_eos=True)
    settings = decode.guided(mix, 30)
    assert settings["plain"] == Setting(wire.Sampling(temperature=0.5, ignore_eos=True))
    assert [settings[name].guidance.constraint for name in ("guided, eq", "guided, le")] == ["eq", "le"]  # type: ignore[union-attr]
    guidance = settings["guided"].guidance
    assert guidance is not None
    assert (guidance.mode, guidance.top_k, settings["guided"].sampling.min_p) == ("centered_exp", 5, 0.01)


def test_the_command_continues_where_it_was_cut(tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --requests 3 --prompt 5 --output 8 --slots 1024 --max-batched-tokens 32"
    command = ["decode", *sizes.split()]
    assert main([*command, "--out", str(tmp_path), "--limit", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == [*LOGPROBS]
    assert main([*command, "--out", str(tmp_path), "--continue"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*summary["settings"]] == [*LOGPROBS]
    for found in summary["settings"].values():
        assert found["tokens"] == 24
        assert 0 < found["of_bound"] < 1
        assert found["bound_tokens_per_s"] > found["steady_tokens_per_s"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert "top 5" in (tmp_path / "tables.txt").read_text()


def test_drafts_that_are_right_take_fewer_steps(engine: Engine) -> None:
    steps = {}
    for name in ("right", "right, drafts"):
        before = engine.loop.stats.steps
        assert measure(engine, Writing(2, 9, 40), 1, DRAFTS[name])["tokens"] == 80
        steps[name] = engine.loop.stats.steps - before
    assert steps["right, drafts"] < 0.7 * steps["right"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_guided_texts_of_the_demo_models(in_this_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--requests 2 --samples 2 --prompt 6 --output 8 --slots 1024 --max-batched-tokens 64"
    assert main(["decode", "--guided", "demo", *sizes.split()]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*summary["settings"]] == ["plain", "guided", "guided, eq", "guided, le"]
    assert {found["tokens"] for found in summary["settings"].values()} == {2 * 2 * 8}
    assert summary["candidates"] >= 1


@pytest.mark.parametrize("option", ["--shape tiny", "--dtype float32"])
def test_guided_texts_have_models_of_their_own(option: str, in_this_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["decode", "--guided", "demo", *option.split()])
    assert "leave --shape and --dtype out" in capsys.readouterr().err
