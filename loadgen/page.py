"""Reports a run as one self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from loadgen.plots import Chart, Series
from loadgen.records import Record
from loadgen.report import (
    AMOUNTS,
    METRICS,
    STAGES,
    TIMES,
    amount_rows,
    failure_rows,
    heading,
    metric_rows,
    stage_rows,
    time_rows,
    verdict_text,
    warnings,
)
from loadgen.statistics import Results, percentile

_BUCKETS = 120
"""Most points of a line over time."""
_DOTS = 2_000
"""Number of requests up to which each request is drawn as a dot."""
_SHARES = (0.0, 50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9, 99.99)
_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, td.word { text-align: left; }
svg { width: 100%; height: auto; margin: .8rem 0; } svg text { font-size: 12px; fill: currentColor; }
svg .title { font-weight: 600; } svg .grid { stroke: var(--line); fill: none; }
.pass { color: #059669; } .fail, .warning { color: #dc2626; } pre { overflow: auto; font-size: 12px; }
"""


def page(results: Results) -> str:
    """Return the page."""
    run = results.run
    title = html.escape(run.scenario["name"])
    began = datetime.fromtimestamp(run.infos[0].started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    facts = {"command": [info.command for info in run.infos], "machine": [info.machine for info in run.infos]}
    parts = [
        f"<h1>{title}</h1><p>{html.escape(heading(run))}<br>{began}</p>",
        *(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(results)),
        _verdicts(results),
        html_table(AMOUNTS, amount_rows(results)),
        html_table(TIMES, time_rows(results)),
        html_table(STAGES, stage_rows(results)),
        html_table(METRICS, metric_rows(results)),
        html_table(("failure", "count", "for example"), ((kind, str(n), text) for kind, n, text in failure_rows(run))),
        *(chart.svg() for chart in charts(results)),
        details("Scenario", run.scenario),
        details("Machine and command", facts),
    ]
    return document(run.scenario["name"], parts)


def document(title: str, parts: Sequence[str]) -> str:
    """Return a page of ``parts``, which are HTML."""
    safe = html.escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{safe}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def charts(results: Results) -> list[Chart]:
    """Return the charts: latency over time, percentiles, throughput over time."""
    records = results.run.records
    width = _bucket_width(records)
    return [
        Chart("Latency over time", "seconds since the start, when due", "ms", _latency_lines(records, width), log_y=True),
        Chart("Percentiles", "percentile", "ms", _percentile_lines(results), log_y=True, ticks=_share_ticks(results)),
        Chart("Requests over time", "seconds since the start", "a second", _rate_lines(records, width)),
    ]


def _bucket_width(records: Sequence[Record]) -> float:
    """Return the width of a bucket in seconds, a whole number of tenths."""
    last = max((record.end for record in records), default=0.0)
    return max(0.1, round(last / _BUCKETS + 0.05, 1))


def _latency_lines(records: Sequence[Record], width: float) -> list[Series]:
    done = [record for record in records if record.failure is None]
    failed = Series(
        "failed", [(record.scheduled, 1000 * max(record.latency, 1e-4)) for record in records if record.failure], dots=True
    )
    if len(done) <= _DOTS:
        each = Series("a request", [(record.scheduled, 1000 * record.latency) for record in done], dots=True)
        return [each, *([failed] if failed.points else [])]
    buckets: dict[int, list[float]] = defaultdict(list)
    for record in done:
        buckets[int(record.scheduled / width)].append(1000 * record.latency)
    for values in buckets.values():
        values.sort()
    lines = [
        Series(f"P{percent}", [((place + 0.5) * width, percentile(values, percent)) for place, values in sorted(buckets.items())])
        for percent in (50, 90, 99)
    ]
    few = Series("failed", failed.points[:: 1 + len(failed.points) // _DOTS], dots=True)
    return [*lines, *([few] if few.points else [])]


def _percentile_lines(results: Results) -> list[Series]:
    """Return percentiles over the number of nines, which makes the tail readable."""
    lines = []
    for summary in results.workloads or [results.total]:
        for name in ("latency", "ttft"):
            ascending = summary.times[name]
            if ascending:
                said = f"{summary.title} " if results.workloads else ""
                shares = [share for share in _SHARES if share <= _resolved(len(ascending))]
                lines.append(Series(f"{said}{name}", [(_nines(share), 1000 * percentile(ascending, share)) for share in shares]))
    return lines


def _share_ticks(results: Results) -> list[tuple[float, str]]:
    most = max((len(summary.times["latency"]) for summary in results.workloads or [results.total]), default=0)
    return [(_nines(share), f"{share:g}") for share in _SHARES if share <= _resolved(most) and share not in (75.0, 98.0, 99.5)]


def _resolved(count: int) -> float:
    """Return the highest percentile that ``count`` values can distinguish from their maximum."""
    return 100 * (1 - 1 / count) if count > 1 else 0.0


def _nines(share: float) -> float:
    return -math.log10(1 - share / 100)


def _rate_lines(records: Sequence[Record], width: float) -> list[Series]:
    def line(name: str, times: Iterable[float]) -> Series:
        counts: dict[int, int] = defaultdict(int)
        for time in times:
            counts[int(time / width)] += 1
        last = max(counts, default=-1)
        return Series(name, [((place + 0.5) * width, counts[place] / width) for place in range(last + 1)])

    lines = [
        line("due", (record.scheduled for record in records)),
        line("answered", (record.end for record in records if record.failure is None)),
        line("failed", (record.end for record in records if record.failure is not None)),
    ]
    return [series for series in lines if series.points]


def _verdicts(results: Results) -> str:
    rows = "".join(
        f'<li class="{"pass" if verdict.met else "fail"}">{"PASS" if verdict.met else "FAIL"}: '
        f"{html.escape(verdict.objective.text)} ({html.escape(verdict_text(verdict))})</li>"
        for verdict in results.verdicts
    )
    return f"<ul>{rows}</ul>" if rows else ""


def html_table(headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table; nothing if it has no rows."""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def details(title: str, content: object) -> str:
    """Return a section with JSON that is closed at first."""
    return f"<details><summary>{title}</summary><pre>{html.escape(json.dumps(content, indent=1))}</pre></details>"
