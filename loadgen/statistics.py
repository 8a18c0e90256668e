"""Computes the numbers of a run from its raw records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loadgen.objectives import TIMES, Objective, Verdict, judge
from loadgen.records import Record, Run
from loadgen.scrapes import Series, summarise

PERCENTILES = (50.0, 90.0, 99.0)
LAG_LIMIT = 0.005
"""P99 of the lag in seconds above which a report warns that the generator, and not the server, may be the bottleneck."""


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` per cent of the values do not exceed. ``ascending`` must not be empty."""
    return ascending[max(0, math.ceil(round(percent * len(ascending) / 100, 9)) - 1)]


@dataclass
class Summary:
    """Numbers of all requests of a run, or of one workload."""

    title: str
    requests: int
    failures: dict[str, int]
    """Failures by kind, the most frequent first; statuses are named ``status 429`` and so on."""
    seconds: float
    """Time from the end of the warm-up to the last successful answer."""
    times: dict[str, list[float]]
    """[name]: ascending times in seconds; ``lag`` of all requests, the others of successful ones."""
    items: int
    tokens: int
    """Tokens of answers, or of prompts if nothing was generated."""
    completion_tokens: int
    good: int
    """Requests that succeeded within the times of the objectives."""
    cache: tuple[int, int]
    """Cache hits and items, of the answers that reported them."""
    wanted: dict[str, float] = field(default_factory=dict)
    """Percentiles that objectives require."""

    @property
    def succeeded(self) -> int:
        """Number of successful requests."""
        return self.requests - sum(self.failures.values())

    def rate(self, amount: float) -> float:
        """Return ``amount`` per second."""
        return amount / self.seconds if self.seconds > 0 else 0.0

    @property
    def values(self) -> dict[str, float]:
        """Return every measure that objectives and comparisons can name; times in seconds."""
        failed = sum(self.failures.values())
        found = {
            "requests": float(self.requests),
            "failures": float(failed),
            "failure_rate": failed / self.requests if self.requests else 0.0,
            "requests_per_s": self.rate(self.succeeded),
            "items_per_s": self.rate(self.items),
            "tokens_per_s": self.rate(self.tokens),
            "goodput": self.rate(self.good),
        }
        if self.cache[1]:
            found["cache_hit_rate"] = self.cache[0] / self.cache[1]
        for name, ascending in self.times.items():
            if ascending:
                found |= {f"{name}_p{percent:g}": percentile(ascending, percent) for percent in PERCENTILES}
                found |= {f"{name}_max": ascending[-1], f"{name}_mean": math.fsum(ascending) / len(ascending)}
        return found | self.wanted

    def as_json(self) -> dict[str, Any]:
        """Return the values, with times in milliseconds, and the failures by kind."""
        summary = {
            f"{name}_ms" if _is_time(name) else name: round(1000 * value if _is_time(name) else value, 4)
            for name, value in self.values.items()
        }
        return summary | {"failures_by_kind": self.failures, "completion_tokens": self.completion_tokens, "seconds": self.seconds}


@dataclass
class Results:
    """Numbers of a run."""

    run: Run
    total: Summary
    workloads: list[Summary]
    """Numbers by workload, if there are several."""
    verdicts: list[Verdict]
    retry_after: int
    """Number of answers with a Retry-After header."""
    stages: list[Summary] = field(default_factory=list)
    """Numbers of the requests that were due in each stage."""

    @cached_property
    def series(self) -> list[Series]:
        """The servers' metrics during the run."""
        return summarise(self.run.scrapes)

    @property
    def passed(self) -> bool:
        """Whether every objective is met, some request was answered, and the run was complete."""
        return all(verdict.met for verdict in self.verdicts) and self.total.succeeded > 0 and not self.run.interrupted

    @property
    def lagging(self) -> float | None:
        """P99 of the lag in seconds, if it exceeds the limit; otherwise None."""
        lag = self.total.values.get("lag_p99", 0.0)
        return lag if lag > LAG_LIMIT else None


def evaluate(run: Run) -> Results:
    """Compute all numbers of a report."""
    objectives = [Objective.parse(text) for text in run.scenario["objectives"]]
    warmup = run.scenario["warmup_s"]
    counted = [record for record in run.records if record.scheduled >= warmup]
    end = max((record.end for record in counted if record.failure is None), default=warmup)
    total = _summary("all", counted, end - warmup, objectives)
    titles = [workload["name"] or workload["kind"] for workload in run.scenario["workloads"]]
    parts = [
        _summary(title, [record for record in counted if record.workload == title], end - warmup, objectives) for title in titles
    ]
    with_retry_after = sum(record.retry_after is not None for record in counted)
    return Results(
        run,
        total,
        parts if len(parts) > 1 else [],
        judge(objectives, total.values),
        with_retry_after,
        _by_stage(run, counted, objectives),
    )


def _by_stage(run: Run, counted: Sequence[Record], objectives: Sequence[Objective]) -> list[Summary]:
    """Return the numbers of each stage. Its rates count until the last successful answer to its requests."""
    found: list[Summary] = []
    begin = 0.0
    stages = run.scenario["arrivals"].get("stages", [])
    for place, stage in enumerate(stages, 1):
        end = begin + stage["seconds"] if place < len(stages) else math.inf  # later turns may be due after the last stage
        records = [record for record in counted if begin <= record.scheduled < end]
        start = max(begin, run.scenario["warmup_s"])
        last = max((record.end for record in records if record.failure is None), default=start)
        found.append(_summary(f"{place}: {stage['rate']:g}/s for {stage['seconds']:g} s", records, last - start, objectives))
        begin = end
    return found


def failure_kind(record: Record) -> str:
    """Return the kind of a failure, with the status for a wrong status."""
    return f"status {record.status}" if record.failure == "status" else str(record.failure)


def _summary(title: str, records: Sequence[Record], seconds: float, objectives: Sequence[Objective]) -> Summary:
    done = [record for record in records if record.failure is None]
    failures = Counter(failure_kind(record) for record in records if record.failure is not None)
    times = {
        "latency": sorted(record.latency for record in done),
        "ttft": _sorted(record.ttft for record in done),
        "tpot": _sorted(record.tpot for record in done),
        "itl": sorted(gap for record in done for gap in record.gaps or ()),
        "lag": sorted(record.lag for record in records),
    }
    completion = sum(record.completion_tokens for record in done)
    return Summary(
        title=title,
        requests=len(records),
        failures=dict(failures.most_common()),
        seconds=seconds,
        times=times,
        items=sum(record.items for record in done),
        tokens=sum(record.completion_tokens or record.prompt_tokens for record in done),
        completion_tokens=completion,
        good=sum(all(objective.allows(record) for objective in objectives) for record in done),
        cache=_cache(done),
        wanted=_wanted(times, objectives),
    )


def _sorted(values: Iterable[float | None]) -> list[float]:
    return sorted(value for value in values if value is not None)


def _wanted(times: dict[str, list[float]], objectives: Sequence[Objective]) -> dict[str, float]:
    """Return the percentiles that objectives name and that no table shows."""
    found: dict[str, float] = {}
    for objective in objectives:
        name, _, what = objective.measure.rpartition("_")
        if objective.of and times[name] and what[0] == "p":
            found[objective.measure] = percentile(times[name], float(what[1:]))
    return found


def _cache(records: Sequence[Record]) -> tuple[int, int]:
    hits = items = 0
    for record in records:
        if record.cache:
            hit, _, of = record.cache.partition("/")
            hits, items = hits + int(hit), items + int(of)
    return hits, items


def _is_time(name: str) -> bool:
    return name.startswith(tuple(f"{time}_" for time in TIMES))
