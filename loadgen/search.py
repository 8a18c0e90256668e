"""Searches for the highest request rate that meets the objectives.

The rate is doubled, or halved, until one rate meets them and a higher one does not. Then the gap between the two is bisected, by
ratio, until it is within the tolerance. Each probe is a run of its own, with another seed, so that no result is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from loadgen.arrivals import Constant, Poisson
from loadgen.errors import LoadError
from loadgen.scenario import Scenario
from loadgen.statistics import Results

LEAST_RATE = 0.01
"""Requests a second below which no rate is tried."""


@dataclass(frozen=True)
class Plan:
    """Bounds of a search."""

    start: float
    """First rate, in requests a second."""
    most: float
    """Highest rate that is tried."""
    tolerance: float
    """Largest ratio between the two final rates, minus 1."""
    probes: int
    """Most runs."""
    seconds: float
    """Most time of all runs, including the wait for the last answers."""

    def __post_init__(self) -> None:
        """Check the bounds. Raises :class:`LoadError`."""
        if not LEAST_RATE <= self.start <= self.most <= 1_000_000:
            raise LoadError(
                f"--start {self.start:g} and --most {self.most:g}: give two rates from {LEAST_RATE} to 1000000, in this order"
            )
        if not 0.001 <= self.tolerance <= 1:
            raise LoadError(f"--tolerance {self.tolerance:g}: give a number from 0.001 to 1, such as 0.05 for 5 %")
        if not 1 <= self.probes <= 100:
            raise LoadError(f"--probes {self.probes}: give a number from 1 to 100")


@dataclass(frozen=True)
class Probe:
    """One run at one rate."""

    rate: float
    results: Results

    @property
    def met(self) -> bool:
        """Whether the run met every objective."""
        return self.results.passed


Reason = Literal["found", "most", "none", "probes", "time", "interrupted"]
"""
- ``found``: both rates are known, within the tolerance
- ``most``: the highest rate that may be tried meets the objectives
- ``none``: not even the lowest rate that may be tried meets them
- ``probes``, ``time``: a bound of the search was reached before
- ``interrupted``: a signal ended it
"""


@dataclass
class Found:
    """Result of a search."""

    scenario: Scenario
    plan: Plan
    command: str
    probes: list[Probe] = field(default_factory=list)
    reason: Reason = "found"

    @property
    def rate(self) -> float | None:
        """The highest rate that met the objectives, and below every rate that did not."""
        return bracket([(probe.rate, probe.met) for probe in self.probes])[0]

    @property
    def missed(self) -> float | None:
        """The lowest rate that did not meet the objectives."""
        return bracket([(probe.rate, probe.met) for probe in self.probes])[1]


def bracket(tried: Sequence[tuple[float, bool]]) -> tuple[float | None, float | None]:
    """Return the lowest rate that failed, and before it the highest rate below that met the objectives; None if there is none."""
    missed = min((rate for rate, met in tried if not met), default=None)
    return max((rate for rate, met in tried if met and (missed is None or rate < missed)), default=None), missed


def next_rate(tried: Sequence[tuple[float, bool]], plan: Plan) -> float | Reason:
    """Return the rate to try after those in ``tried``, each with whether it met the objectives, or why there is none."""
    met, missed = bracket(tried)
    if met is None and missed is None:
        return plan.start
    if missed is None:
        assert met is not None
        return "most" if met >= plan.most else min(2 * met, plan.most)
    if met is None:
        return "none" if missed <= LEAST_RATE else max(missed / 2, LEAST_RATE)
    return "found" if missed <= met * (1 + plan.tolerance) else (met * missed) ** 0.5


Measure = Callable[[Scenario, int], Results]
"""Runs a scenario; the number is that of the probe, from 1."""


def search(scenario: Scenario, plan: Plan, command: str, measure: Measure, clock: Callable[[], float] = time.monotonic) -> Found:
    """Search with runs of ``scenario``, whose arrivals must have one rate. Raises :class:`LoadError`."""
    arrivals = scenario.arrivals
    if not isinstance(arrivals, Poisson | Constant):
        raise LoadError("a search needs arrivals of the kind `poisson` or `constant`, whose rate it changes")
    if not scenario.objectives:
        raise LoadError("a search needs objectives, such as --objective 'p99 <= 200ms' --objective 'failure_rate <= 0.1%'")
    longest = scenario.duration_s + scenario.target.timeout_s
    if longest > plan.seconds:
        raise LoadError(f"one run may take {longest:g} s (`duration_s` and `target.timeout_s`), more than --limit {plan.seconds:g}")
    found, deadline = Found(scenario, plan, command), clock() + plan.seconds
    while not isinstance(rate := next_rate([(probe.rate, probe.met) for probe in found.probes], plan), str):
        if len(found.probes) == plan.probes or clock() + longest > deadline:
            found.reason = "probes" if len(found.probes) == plan.probes else "time"
            return found
        number = len(found.probes)
        changed = msgspec.structs.replace(
            scenario, arrivals=msgspec.structs.replace(arrivals, rate=rate), seed=scenario.seed + number
        )
        results = measure(changed, number + 1)
        if results.run.interrupted:
            found.reason = "interrupted"
            return found
        found.probes.append(Probe(rate, results))
    found.reason = rate
    return found
