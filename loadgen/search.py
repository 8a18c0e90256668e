"""Searches for the highest request rate that meets the objectives, and reports the search.

The rate is doubled, or halved, until one rate meets them and a higher one does not. Then the gap between the two is bisected, by
ratio, until it is within the tolerance. Each probe is a run of its own, with another seed, so that no result is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rich.text import Text

from yardstick_llm.loadgen.arrivals import Constant, Poisson
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.records import writing
from yardstick_llm.loadgen.report import milliseconds, print_parts, table
from yardstick_llm.loadgen.scenario import Scenario, as_settings
from yardstick_llm.loadgen.statistics import LAG_LIMIT, Results

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


class Probe(NamedTuple):
    """One run at one rate."""

    rate: float
    results: Results

    @property
    def met(self) -> bool:
        """Whether the run met every objective."""
        return self.results.passed


Reason = Literal["found", "most", "none", "probes", "time", "interrupted"]
_ENDINGS: dict[Reason, str] = {
    "found": "within the tolerance",
    "most": "the highest rate that may be tried (--most)",
    "none": "no lower rate is tried",
    "probes": "not within the tolerance: the search ended after --probes runs",
    "time": "not within the tolerance: the search ended at its --limit of time",
    "interrupted": "a signal ended the search",
}


@dataclass
class Found:
    """Result of a search."""

    scenario: Scenario
    plan: Plan
    command: str
    probes: list[Probe] = field(default_factory=list)
    reason: Reason = "found"

    @property
    def missed(self) -> float | None:
        """The lowest rate that did not meet the objectives."""
        return min((probe.rate for probe in self.probes if not probe.met), default=None)

    @property
    def rate(self) -> float | None:
        """The highest rate that met the objectives, and below every rate that did not."""
        missed = self.missed
        return max((probe.rate for probe in self.probes if probe.met and (missed is None or probe.rate < missed)), default=None)

    def next_rate(self) -> float | Reason:
        """Return the rate to try next, or why there is none."""
        met, missed, plan = self.rate, self.missed, self.plan
        if missed is None:
            if met is None:
                return plan.start
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
    while not isinstance(rate := found.next_rate(), str):
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


def verdict(found: Found) -> str:
    """Return the result as a sentence."""
    met = "no rate met the objectives" if found.rate is None else f"{found.rate:.4g} requests a second met the objectives"
    missed = "" if found.missed is None else f", {found.missed:.4g} did not"
    return f"{met}{missed} ({_ENDINGS[found.reason]})"


def warnings(found: Found) -> list[str]:
    """Return warnings about the validity of the result."""
    late = [probe.rate for probe in found.probes if not probe.met and probe.results.lagging is not None]
    if not late:
        return []
    return [
        f"At {min(late):.4g} requests a second the generator lagged its schedule by more than {1000 * LAG_LIMIT:g} ms at P99: "
        "the limit may be that of its machine."
    ]


def show(found: Found) -> None:
    """Print the report to standard output; the last line is JSON."""
    lines = [*(f"! {warning}" for warning in warnings(found)), verdict(found)]
    print_parts([table(HEADINGS, rows(found), left=0), *map(Text, lines)])
    print(as_json(found), flush=True)


def write(found: Found, folder: Path) -> None:
    """Write ``search.json``. Raises :class:`LoadError`."""
    with writing(folder):
        (folder / "search.json").write_text(as_json(found) + "\n", encoding="utf-8")


HEADINGS = ("rate", "sent", "failed", "answered/s", "goodput/s", "P50 ms", "P99 ms", "TTFT P99 ms", "lag P99 ms", "objectives")


def rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the numbers of each run, by ascending rate."""
    for probe in sorted(found.probes, key=lambda probe: probe.rate):
        summary = probe.results.total
        missed = [verdict.objective.text for verdict in probe.results.verdicts if not verdict.met]
        yield (
            f"{probe.rate:.4g}",
            str(summary.requests),
            str(summary.requests - summary.succeeded),
            f"{summary.values['requests_per_s']:.1f}",
            f"{summary.values['goodput']:.1f}",
            *(milliseconds(summary, name) for name in ("latency_p50", "latency_p99", "ttft_p99", "lag_p99")),
            "met" if probe.met else f"missed: {', '.join(missed) or 'no answer'}",
        )


def as_json(found: Found) -> str:
    """Return the result and the numbers of every run, in the order of the runs, in one line of JSON."""
    probes = [{"rate": probe.rate, "met": probe.met, **probe.results.total.as_json()} for probe in found.probes]
    result = {
        "name": found.scenario.name,
        "rate": found.rate,
        "missed": found.missed,
        "reason": found.reason,
        "probes": probes,
        "command": found.command,
        "machine": found.probes[0].results.run.infos[0].machine if found.probes else {},
        "scenario": as_settings(found.scenario),
    }
    return msgspec.json.encode(result).decode()
