"""Schedules: their statistics, their division among workers, and files that are no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev, pvariance

import pytest

from yardstick_llm.loadgen.arrivals import Constant, Open, Poisson, Ramp, Share, Stage, Stages, Trace, schedule
from yardstick_llm.loadgen.content import Empirical, LogNormal, Uniform, draw
from yardstick_llm.loadgen.errors import LoadError


def times(arrivals: Open, seconds: float, seed: int = 0, share: Share | None = None) -> list[float]:
    return list(schedule(arrivals, seconds, seed, share or Share()))


def counts(arrivals: list[float], width: float, seconds: float) -> list[int]:
    found = [0] * round(seconds / width)
    for time in arrivals:
        found[int(time / width)] += 1
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_poisson_arrivals_are_poisson(workers: int) -> None:
    parts = [times(Poisson(rate=100), 200, 0, Share(index, workers)) for index in range(workers)]
    arrivals = sorted(time for part in parts for time in part)
    assert abs(len(arrivals) - 20_000) < 5 * math.sqrt(20_000)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(0.01, rel=0.04)
    assert pstdev(gaps) == pytest.approx(0.01, rel=0.05), "exponential gaps: deviation equals mean"
    windows = counts(arrivals, 0.1, 200)
    assert pvariance(windows) == pytest.approx(fmean(windows), rel=0.13), "counts: variance equals mean"
    halves = fmean((a - 0.01) * (b - 0.01) for a, b in pairwise(gaps)) / 0.01**2
    assert abs(halves) < 0.04, "gaps are independent"


def test_constant_gaps_of_several_workers_interleave() -> None:
    whole = [place / 8 for place in range(16)]
    assert times(Constant(rate=8), 2) == whole
    parts = [times(Constant(rate=8), 2, share=Share(index, 3)) for index in range(3)]
    assert sorted(time for part in parts for time in part) == whole


STAGES = Stages(stages=(Stage(rate=10, seconds=50), Stage(rate=0, seconds=20), Stage(rate=40, seconds=50)))
RATES: list[tuple[Open, Callable[[float], float]]] = [
    (Ramp(rate=10, to=190, over_s=100), lambda time: 10 + 1.8 * min(time, 100)),
    (Ramp(rate=190, to=10, over_s=100), lambda time: 190 - 1.8 * min(time, 100)),
    (Ramp(rate=100, to=100, over_s=100), lambda _: 100),
    (STAGES, lambda time: 10 if time < 50 else 40 if 70 < time < 120 else 0),
]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("arrivals", "rate"), RATES)
def test_each_moment_has_its_rate(arrivals: Open, rate: Callable[[float], float], workers: int) -> None:
    parts = [times(arrivals, 150, 1, Share(index, workers)) for index in range(workers)]
    assert parts == [sorted(part) for part in parts]
    for window, count in enumerate(counts([time for part in parts for time in part], 10, 150)):
        expected = 10 * rate(10 * window + 5)
        assert abs(count - expected) <= 5 * math.sqrt(expected), window
    assert times(arrivals, 60) == [time for time in times(arrivals, 150) if time < 60], "a shorter run is its beginning"


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "times"
    file.write_text("# seconds\n100\n100.5 # first\n\n101\n103\n")
    assert times(Trace(file=str(file)), 60) == [0, 0.5, 1, 3]
    assert times(Trace(file=str(file), speed=2), 1.5) == [0, 0.25, 0.5]
    assert times(Trace(file=str(file)), 60, share=Share(1, 2)) == [0.5, 3]


@pytest.mark.parametrize(
    ("text", "says"),
    [("1\n0.5\n", "line 2: 0.5 is not a time after"), ("1\nsoon\n", "line 2: 'soon'"), ("nan\n", "line 1"), ("#\n", "no times")],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "times"
    file.write_text(text)
    with pytest.raises(LoadError, match=says):
        times(Trace(file=str(file)), 1)
    with pytest.raises(LoadError, match="no such file"):
        times(Trace(file=str(tmp_path / "none")), 1)


SOME: list[tuple[int | Uniform | LogNormal | Empirical, Callable[[list[int]], bool]]] = [
    (7, lambda drawn: set(drawn) == {7}),
    (Uniform(min=3, max=6), lambda drawn: all(4600 < drawn.count(value) < 5400 for value in (3, 4, 5, 6))),
    (LogNormal(median=100, sigma=0.5, max=10_000), lambda drawn: abs(sorted(drawn)[10_000] - 100) <= 3),
    (LogNormal(median=100, sigma=0.5, max=10_000), lambda drawn: abs(pstdev(map(math.log, drawn)) - 0.5) < 0.02),
    (LogNormal(median=100, sigma=1, max=150), lambda drawn: max(drawn) == 150),
    (LogNormal(median=0.1, sigma=1, max=150), lambda drawn: min(drawn) == 1),
    (Empirical(values=(5, 50)), lambda drawn: 9600 < drawn.count(50) < 10_400),
    (Empirical(values=(5, 50), weights=(9, 1)), lambda drawn: 1800 < drawn.count(50) < 2200),
]


@pytest.mark.parametrize(("distribution", "holds"), SOME)
def test_values_are_distributed_as_said(
    distribution: int | Uniform | LogNormal | Empirical, holds: Callable[[list[int]], bool]
) -> None:
    rng = Random(1)
    assert holds([draw(distribution, rng) for _ in range(20_000)])
