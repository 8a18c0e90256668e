"""Computes the numbers of a run from its raw records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from yardstick_llm.loadgen.records import Record, Run, Scrape
from yardstick_llm.loadgen.scenario import TIMES, Objective

PERCENTILES = (50.0, 90.0, 99.0)
LAG_LIMIT = 0.005
"""P99 of the lag in seconds above which a report warns that the generator, and not the server, may be the bottleneck."""


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` per cent of the values do not exceed. ``ascending`` must not be empty."""
    return ascending[max(0, math.ceil(round(percent * len(ascending) / 100, 9)) - 1)]


class Summary(NamedTuple):
    """Numbers of all requests of a run, of one workload, or of one stage."""

    title: str
    values: dict[str, float]
    """Every measure that objectives and comparisons can name; times in seconds, the lag of all requests, the others of successful
    ones. Tokens are those of answers, or of prompts if nothing was generated."""
    failures: dict[str, int]
    """Failures by kind, the most frequent first; statuses are named ``status 429`` and so on."""
    completion_tokens: int
    seconds: float
    """Time from the end of the warm-up to the last successful answer."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self.values["requests"])

    @property
    def succeeded(self) -> int:
        """Number of successful requests."""
        return self.requests - sum(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the values, with times in milliseconds, and the failures by kind."""
        summary: dict[str, Any] = {}
        for name, value in self.values.items():
            if name.startswith(tuple(f"{time}_" for time in TIMES)):
                summary[f"{name}_ms"] = round(1000 * value, 4)
            else:
                summary[name] = round(value, 4)
        return summary | {"failures_by_kind": self.failures, "completion_tokens": self.completion_tokens, "seconds": self.seconds}


class Verdict(NamedTuple):
    """An objective and its value; None if it was not measured (nothing was sent, or no stream was read)."""

    objective: Objective
    value: float | None

    @property
    def met(self) -> bool:
        """See :meth:`Objective.met`."""
        return self.objective.met(self.value)


class Series(msgspec.Struct):
    """Values of one series of one page during a run."""

    url: str
    name: str
    kind: str
    """``counter``, ``mean`` (of a histogram or summary) or ``gauge``."""
    value: float
    """Increase of a counter, mean of the histogram's new values, or mean of a gauge over the reads."""
    most: float | None = None
    """Largest value of a gauge."""
    count: int | None = None
    """Number of the histogram's new values."""


@dataclass
class Results:
    """Numbers of a run."""

    run: Run
    total: Summary
    workloads: list[Summary]
    """Numbers by workload, if there are several."""
    stages: list[Summary]
    """Numbers of the requests that were due in each stage."""
    verdicts: list[Verdict]
    retry_after: int
    """Number of answers with a Retry-After header."""

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
    scenario = run.scenario
    objectives = [Objective.parse(text) for text in scenario["objectives"]]
    warmup = scenario["warmup_s"]
    counted = [record for record in run.records if record.scheduled >= warmup]
    seconds = _last_answer(counted, warmup) - warmup
    total = _summary("all", counted, seconds, objectives)

    titles = [workload["name"] or workload["kind"] for workload in scenario["workloads"]]
    by_workload = [(title, [record for record in counted if record.workload == title]) for title in titles if len(titles) > 1]
    workloads = [_summary(title, records, seconds, objectives) for title, records in by_workload]

    stages: list[Summary] = []
    begin, planned = 0.0, scenario["arrivals"].get("stages", [])
    for place, stage in enumerate(planned, 1):
        end = begin + stage["seconds"] if place < len(planned) else math.inf  # later turns may be due after the last stage
        records = [record for record in counted if begin <= record.scheduled < end]
        start = max(begin, warmup)
        title = f"{place}: {stage['rate']:g}/s for {stage['seconds']:g} s"
        stages.append(_summary(title, records, _last_answer(records, start) - start, objectives))
        begin = end

    measured = total.values if total.requests else {}
    verdicts = [Verdict(objective, measured.get(objective.measure)) for objective in objectives]
    retry_after = sum(record.retry_after is not None for record in counted)
    return Results(run, total, workloads, stages, verdicts, retry_after)


def _last_answer(records: Sequence[Record], start: float) -> float:
    return max((record.end for record in records if record.failure is None), default=start)


def failure_kind(record: Record) -> str:
    """Return the kind of a failure, with the status for a wrong status."""
    return f"status {record.status}" if record.failure == "status" else str(record.failure)


def _summary(title: str, records: Sequence[Record], seconds: float, objectives: Sequence[Objective]) -> Summary:
    done = [record for record in records if record.failure is None]
    failures = Counter(failure_kind(record) for record in records if record.failure is not None)
    failed = len(records) - len(done)
    amounts = {
        "requests_per_s": len(done),
        "items_per_s": sum(record.items for record in done),
        "tokens_per_s": sum(record.completion_tokens or record.prompt_tokens for record in done),
        "goodput": sum(all(objective.allows(record) for objective in objectives) for record in done),
    }
    values = {"requests": float(len(records)), "failures": float(failed), "failure_rate": failed / len(records) if records else 0.0}
    values |= {name: amount / seconds if seconds > 0 else 0.0 for name, amount in amounts.items()}

    cached = [tuple(map(int, record.cache.split("/"))) for record in done if record.cache]
    if items := sum(of for _, of in cached):
        values["cache_hit_rate"] = sum(hits for hits, _ in cached) / items

    times = {
        "latency": sorted(record.latency for record in done),
        "ttft": sorted(record.ttft for record in done if record.ttft is not None),
        "tpot": sorted(record.tpot for record in done if record.tpot is not None),
        "itl": sorted(gap for record in done for gap in record.gaps or ()),
        "lag": sorted(record.lag for record in records),
    }
    for name, ascending in times.items():
        if ascending:
            values |= {f"{name}_p{percent:g}": percentile(ascending, percent) for percent in PERCENTILES}
            values |= {f"{name}_max": ascending[-1], f"{name}_mean": math.fsum(ascending) / len(ascending)}
    for objective in objectives:
        name, _, what = objective.measure.rpartition("_")
        if objective.of and times[name] and what[0] == "p":
            values[objective.measure] = percentile(times[name], float(what[1:]))
    completion_tokens = sum(record.completion_tokens for record in done)
    return Summary(title, values, dict(failures.most_common()), completion_tokens, seconds)


def summarise(scrapes: Sequence[Scrape]) -> list[Series]:
    """Return each series that was not zero throughout. A counter that falls was reset: its server has started again."""
    pages: dict[str, list[Scrape]] = defaultdict(list)
    for scrape in scrapes:
        if not scrape.error:
            pages[scrape.url].append(scrape)
    found: list[Series] = []
    for url, reads in pages.items():
        increases = {name: _increase([read.counters.get(name, 0.0) for read in reads]) for name in reads[-1].counters}
        for name, increase in increases.items():
            base, brace, labels = name.partition("{")
            count = increases.get(f"{base.removesuffix('_sum')}_count{brace}{labels}") if base.endswith("_sum") else None
            if count:
                found.append(Series(url, base.removesuffix("_sum") + brace + labels, "mean", increase / count, count=round(count)))
            elif increase and not (base.endswith("_count") and f"{base.removesuffix('_count')}_sum{brace}{labels}" in increases):
                found.append(Series(url, name, "counter", increase))
        for name in reads[-1].gauges:
            values = [read.gauges[name] for read in reads if name in read.gauges]
            if any(values):
                found.append(Series(url, name, "gauge", math.fsum(values) / len(values), max(values)))
    return found


def _increase(values: Sequence[float]) -> float:
    return math.fsum(new - old if new >= old else new for old, new in pairwise(values))
