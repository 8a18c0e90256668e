"""Reports a run as text for a terminal, and as one line of JSON for programs."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.objectives import Verdict
from loadgen.records import Run
from loadgen.statistics import LAG_LIMIT, Results, Summary, failure_kind

WIDTH = 110
"""Columns of text if there is no terminal."""
TIME_NAMES = {
    "latency": "latency",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "lag": "generator's lag",
}
_COLUMNS = ("p50", "p90", "p99", "max")


def show(results: Results) -> None:
    """Print the report to standard output; the last line is JSON."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for part in _parts(results):
        console.print(part)
    print(as_json(results), flush=True)


def as_text(results: Results) -> str:
    """Return the report without its last line."""
    console = Console(file=io.StringIO(), width=WIDTH)
    with console.capture() as capture:
        for part in _parts(results):
            console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


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


def heading(run: Run) -> str:
    """Return a line that describes the run."""
    scenario = run.scenario
    stages = [f"{stage['rate']:g}/s for {stage['seconds']:g} s" for stage in scenario["arrivals"].get("stages", [])]
    arrivals = ", ".join(stages or (f"{name} {value}" for name, value in scenario["arrivals"].items() if name != "kind"))
    workers = f", {len(run.infos)} workers" if len(run.infos) > 1 else ""
    kind, seconds, target = scenario["arrivals"]["kind"], scenario["duration_s"], scenario["target"]["url"]
    return f"{scenario['name']}: {kind} arrivals ({arrivals}) for {seconds:g} s at {target}{workers}"


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


def verdict_text(verdict: Verdict) -> str:
    """Return the value to show for an objective."""
    if verdict.value is None:
        return "not measured"
    return f"{1000 * verdict.value:.1f} ms" if verdict.objective.of else f"{verdict.value:.4g}"


def failure_rows(run: Run) -> list[tuple[str, int, str]]:
    """Return kind, count and an example of each failure, the most frequent first."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for record in run.records:
        if record.failure is not None:
            kind = failure_kind(record)
            counts[kind] = counts.get(kind, 0) + 1
            examples.setdefault(kind, record.detail)
    return [(kind, count, examples[kind]) for kind, count in sorted(counts.items(), key=lambda pair: -pair[1])]


def amount_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield counts and rates of each workload and in total."""
    for summary in (*results.workloads, results.total):
        hits, items = summary.cache
        yield (
            summary.title,
            str(summary.requests),
            str(summary.requests - summary.succeeded),
            f"{summary.rate(summary.succeeded):.1f}",
            f"{summary.rate(summary.good):.1f}",
            f"{summary.rate(summary.items):.1f}" if summary.items else "–",
            f"{summary.rate(summary.tokens):.0f}",
            f"{hits / items:.0%}" if items else "–",
        )


AMOUNTS = ("workload", "sent", "failed", "requests/s", "goodput/s", "items/s", "tokens/s", "from cache")


def time_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield percentiles of each measured time, in milliseconds."""
    for summary in (*results.workloads, results.total):
        for name, title in TIME_NAMES.items():
            if summary.times[name] and (name != "lag" or summary is results.total):
                yield (summary.title, title, *_milliseconds(summary, name))


TIMES = ("workload", "ms", "P50", "P90", "P99", "max")


def stage_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the main numbers of each stage, times in milliseconds."""
    for summary in results.stages:
        times = ("latency_p50", "latency_p90", "latency_p99", "ttft_p99")
        yield (
            summary.title,
            str(summary.requests),
            str(summary.requests - summary.succeeded),
            f"{summary.rate(summary.succeeded):.1f}",
            f"{summary.rate(summary.good):.1f}",
            *(f"{1000 * summary.values[name]:.1f}" if name in summary.values else "–" for name in times),
        )


STAGES = ("stage", "sent", "failed", "requests/s", "goodput/s", "P50 ms", "P90 ms", "P99 ms", "TTFT P99 ms")


def metric_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the main metrics of the servers: increases of counters, means of histograms, and gauges."""
    several = len({series.url for series in results.series}) > 1
    for series in results.series:
        if series.name.startswith(_SHOWN):
            more = {
                "counter": "increase",
                "mean": f"mean of {series.count}",
                "gauge": f"mean; at most {series.most:g}" if series.most else "",
            }
            yield (f"{series.url} {series.name}" if several else series.name, f"{series.value:.4g}", more[series.kind])


METRICS = ("metric", "value", "of the run")
_SHOWN = (
    "yardstick_cache_lookups",
    "yardstick_tokens",
    "yardstick_items",
    "yardstick_text_wait_seconds",
    "yardstick_request_seconds",
    "yardstick_requests_in_flight",
    "yardstick_requests_waiting",
    "yardstick_event_loop_blocked_seconds",
    "yardstick_engine_wait_seconds",
    "yardstick_engine_requests_",
    "yardstick_engine_cached_",
    "yardstick_engine_computed_tokens",
    "yardstick_engine_errors",
    "yardstick_engine_retries",
    "yardstick_model_requests_waiting",
)
"""Beginnings of the names that tables show. ``summary.json`` has all."""


def _milliseconds(summary: Summary, name: str) -> list[str]:
    values = summary.values
    return [f"{1000 * values[f'{name}_{column}']:.1f}" for column in _COLUMNS]


def _parts(results: Results) -> Iterator[RenderableType]:
    yield Text(heading(results.run))
    yield table(AMOUNTS, amount_rows(results), left=1)
    yield table(TIMES, time_rows(results), left=2)
    if results.stages:
        yield table(STAGES, stage_rows(results), left=1)
    if metrics := list(metric_rows(results)):
        yield table(METRICS, metrics, left=1)
    failures = [(kind, str(count), example) for kind, count, example in failure_rows(results.run)]
    if failures:
        yield table(("failure", "count", "for example"), failures, left=1)
    for warning in warnings(results):
        yield Text(f"! {warning}")
    for verdict in results.verdicts:
        yield Text(f"{'PASS' if verdict.met else 'FAIL'}  {verdict.objective.text}: {verdict_text(verdict)}")


def table(headings: Sequence[str], rows: Iterable[tuple[str, ...]], left: int) -> Table:
    """Create a table. ``left``: number of columns with words; the others hold numbers and are right-aligned."""
    table = Table()
    for place, name in enumerate(headings):
        table.add_column(name, justify="left" if place < left or name == "for example" else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
