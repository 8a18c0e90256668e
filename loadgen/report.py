"""Reports a run as text for a terminal, and as one line of JSON for programs; compares two runs."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.records import RECORDS, Run, writing
from yardstick_llm.loadgen.statistics import LAG_LIMIT, Results, Summary, failure_kind

WIDTH = 110
"""Columns of text if there is no terminal."""
TIME_NAMES = {
    "latency": "latency",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "lag": "generator's lag",
}
_SHOWN = re.compile(
    r"yardstick_(cache_lookups|tokens|items|text_wait_seconds|request_seconds|requests_(in_flight|waiting)|event_loop_blocked_seconds"
    r"|engine_(wait_seconds|requests_|cached_|computed_tokens|errors|retries)|model_requests_waiting)"
)
"""Metrics that tables show. ``summary.json`` has all."""
_COMPARED = {
    "requests_per_s": "requests/s",
    "goodput": "goodput/s",
    "items_per_s": "items/s",
    "tokens_per_s": "tokens/s",
    "failures": "failures",
    "cache_hit_rate": "cache hit rate",
} | {
    f"{name}_{what}": f"{title}, {what if what == 'max' else what.upper()} ms"
    for name, title in TIME_NAMES.items()
    for what in ("p50", "p90", "p99", "max")
}


def show(results: Results) -> None:
    """Print the report to standard output; the last line is JSON."""
    print_parts(_parts(results))
    print(as_json(results), flush=True)


def write(results: Results, folder: Path) -> None:
    """Write ``report.txt`` and ``summary.json``. Raises :class:`LoadError`, also if the run could not write all its records."""
    if results.run.unwritten:
        left = f"{folder / RECORDS} has the first ones"
        raise LoadError(f"cannot write all records to {folder}: {results.run.unwritten}; {left}; choose another --out")
    with writing(folder):
        (folder / "report.txt").write_text(as_text(results), encoding="utf-8")
        (folder / "summary.json").write_text(as_json(results) + "\n", encoding="utf-8")


def as_text(results: Results) -> str:
    """Return the report without its last line."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH)
    for part in _parts(results):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def as_json(results: Results) -> str:
    """Return all numbers in one line of JSON."""
    document = {
        "name": results.run.scenario["name"],
        "passed": results.passed,
        "interrupted": results.run.interrupted,
        "objectives": [
            {"objective": verdict.objective.text, "met": verdict.met, "value": verdict.value} for verdict in results.verdicts
        ],
        **results.total.as_json(),
        "workloads": {summary.title: summary.as_json() for summary in results.workloads},
        "stages": {summary.title: summary.as_json() for summary in results.stages},
        "metrics": [msgspec.to_builtins(series) for series in results.series],
        "lagging": results.lagging is not None,
        "retry_after_answers": results.retry_after,
        "workers": len(results.run.infos),
        "command": results.run.infos[0].command,
        "machine": results.run.infos[0].machine,
        "scenario": results.run.scenario,
    }
    return msgspec.json.encode(document).decode()


def warnings(results: Results) -> list[str]:
    """Return warnings about the validity of the numbers."""
    found = []
    if results.lagging is not None:
        found.append(
            f"The generator lagged its schedule by {1000 * results.lagging:.1f} ms at P99 (more than {1000 * LAG_LIMIT:g}): "
            "its machine is too slow or too busy for this rate. Latencies include the lag; use more workers or a quieter machine."
        )
    if results.run.interrupted:
        found.append("The run was interrupted; the report covers the requests until then.")
    if "exhausted" in results.total.failures:
        found.append("The generator ran out of file descriptors or ports (`exhausted`): raise `ulimit -n`, or use more workers.")
    unread = {scrape.url: scrape.error for scrape in results.run.scrapes if scrape.error}
    found += [f"Not all reads of {url} succeeded ({error}); its numbers are incomplete." for url, error in unread.items()]
    return found


def _parts(results: Results) -> Iterator[RenderableType]:
    yield Text(_heading(results.run))
    summaries = (*results.workloads, results.total)
    amounts = ("sent", "failed", "requests/s", "goodput/s")
    yield table(("workload", *amounts, "items/s", "tokens/s", "from cache"), map(_amounts, summaries), left=1)
    times = (
        (summary.title, title, *(milliseconds(summary, f"{name}_{column}") for column in ("p50", "p90", "p99", "max")))
        for summary in summaries
        for name, title in TIME_NAMES.items()
        if f"{name}_p50" in summary.values and (name != "lag" or summary is results.total)
    )
    yield table(("workload", "ms", "P50", "P90", "P99", "max"), times, left=2)
    if results.stages:
        names = ("latency_p50", "latency_p90", "latency_p99", "ttft_p99")
        stages = ((*_amounts(summary)[:5], *(milliseconds(summary, name) for name in names)) for summary in results.stages)
        yield table(("stage", *amounts, "P50 ms", "P90 ms", "P99 ms", "TTFT P99 ms"), stages, left=1)
    if metrics := list(_metrics(results)):
        yield table(("metric", "value", "of the run"), metrics, left=1)
    if failures := _failures(results.run):
        yield table(("failure", "count", "for example"), failures, left=1)
    for warning in warnings(results):
        yield Text(f"! {warning}")
    for verdict in results.verdicts:
        value = "not measured"
        if verdict.value is not None:
            value = f"{1000 * verdict.value:.1f} ms" if verdict.objective.of else f"{verdict.value:.4g}"
        yield Text(f"{'PASS' if verdict.met else 'FAIL'}  {verdict.objective.text}: {value}")


def _heading(run: Run) -> str:
    scenario = run.scenario
    stages = [f"{stage['rate']:g}/s for {stage['seconds']:g} s" for stage in scenario["arrivals"].get("stages", [])]
    arrivals = ", ".join(stages or (f"{name} {value}" for name, value in scenario["arrivals"].items() if name != "kind"))
    workers = f", {len(run.infos)} workers" if len(run.infos) > 1 else ""
    kind, seconds, target = scenario["arrivals"]["kind"], scenario["duration_s"], scenario["target"]["url"]
    return f"{scenario['name']}: {kind} arrivals ({arrivals}) for {seconds:g} s at {target}{workers}"


def _amounts(summary: Summary) -> tuple[str, ...]:
    values = summary.values
    return (
        summary.title,
        str(summary.requests),
        str(summary.requests - summary.succeeded),
        f"{values['requests_per_s']:.1f}",
        f"{values['goodput']:.1f}",
        f"{values['items_per_s']:.1f}" if values["items_per_s"] else "–",
        f"{values['tokens_per_s']:.0f}",
        f"{values['cache_hit_rate']:.0%}" if "cache_hit_rate" in values else "–",
    )


def milliseconds(summary: Summary, name: str) -> str:
    """Return the time of this name."""
    return f"{1000 * summary.values[name]:.1f}" if name in summary.values else "–"


def _metrics(results: Results) -> Iterator[tuple[str, str, str]]:
    """Yield the main metrics of the servers: increases of counters, means of histograms, and gauges."""
    several = len({series.url for series in results.series}) > 1
    for series in results.series:
        if _SHOWN.match(series.name):
            more = {
                "counter": "increase",
                "mean": f"mean of {series.count}",
                "gauge": f"mean; at most {series.most:g}" if series.most else "",
            }
            yield (f"{series.url} {series.name}" if several else series.name, f"{series.value:.4g}", more[series.kind])


def _failures(run: Run) -> list[tuple[str, str, str]]:
    """Return kind, count and an example of each failure, the most frequent first."""
    details: dict[str, list[str]] = {}
    for record in run.records:
        if record.failure is not None:
            details.setdefault(failure_kind(record), []).append(record.detail)
    return [(kind, str(len(texts)), texts[0]) for kind, texts in sorted(details.items(), key=lambda pair: -len(pair[1]))]


def table(headings: Sequence[str], rows: Iterable[tuple[str, ...]], left: int) -> Table:
    """Create a table. ``left``: number of columns with words; the others hold numbers and are right-aligned."""
    table = Table()
    for place, name in enumerate(headings):
        table.add_column(name, justify="left" if place < left or name == "for example" else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines to standard output."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        console.print(part)


def compare(first: Results, second: Results, names: tuple[str, str]) -> None:
    """Print measures, ratios (second to first) and other differences; the last line is JSON."""
    rows = []
    for name, title in _COMPARED.items():
        if name in first.total.values and name in second.total.values:
            values = [(1000 if title.endswith(" ms") else 1) * results.total.values[name] for results in (first, second)]
            ratio = f"{values[1] / values[0]:.3f}" if values[0] else "–"
            rows.append((title, *(f"{value:.2f}" for value in values), ratio))
    differences = dict(differing(_facts(first), _facts(second)))
    lines = [Text(f"! {key} differs: {values[0]} and {values[1]}") for key, values in differences.items()]
    print_parts([table(("", *names, "ratio"), rows, left=1), *lines])
    document = {
        "first": first.total.as_json(),
        "second": second.total.as_json(),
        "ratios": {
            name: second.total.values[name] / value
            for name, value in first.total.values.items()
            if value and name in second.total.values
        },
        "differences": differences,
    }
    print(msgspec.json.encode(document).decode(), flush=True)


def _facts(results: Results) -> dict[str, Any]:
    """Return facts that two runs should have in common. They exclude the load average, which always differs."""
    machine = {name: value for name, value in results.run.infos[0].machine.items() if name != "load"}
    return {"scenario": results.run.scenario, "machine": machine, "workers": len(results.run.infos)}


def differing(first: Any, second: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the keys at which two documents differ, and the values there."""
    if isinstance(first, dict) and isinstance(second, dict):
        for name in [*first, *(name for name in second if name not in first)]:
            yield from differing(first.get(name), second.get(name), f"{key}.{name}" if key else name)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for place, pair in enumerate(zip(first, second, strict=True)):
            yield from differing(*pair, f"{key}[{place}]")
    elif first != second:
        yield key, (first, second)
