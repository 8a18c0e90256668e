"""Reports a search: a table and one line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from loadgen.files import writing
from loadgen.report import WIDTH, table
from loadgen.scenario import as_settings
from loadgen.search import Found, Probe, Reason
from loadgen.statistics import LAG_LIMIT

HEADINGS = ("rate", "sent", "failed", "answered/s", "goodput/s", "P50 ms", "P99 ms", "TTFT P99 ms", "lag P99 ms", "objectives")
_ENDINGS: dict[Reason, str] = {
    "found": "within the tolerance",
    "most": "the highest rate that may be tried (--most)",
    "none": "no lower rate is tried",
    "probes": "not within the tolerance: the search ended after --probes runs",
    "time": "not within the tolerance: the search ended at its --limit of time",
    "interrupted": "a signal ended the search",
}


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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(HEADINGS, rows(found), left=0))
    for text in (*(f"! {warning}" for warning in warnings(found)), verdict(found)):
        console.print(Text(text))
    print(as_json(found), flush=True)


def write(found: Found, folder: Path) -> None:
    """Write ``search.json``. Raises :class:`LoadError`."""
    with writing(folder):
        (folder / "search.json").write_text(as_json(found) + "\n", encoding="utf-8")


def rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the numbers of each run, by ascending rate."""
    for probe in _ascending(found):
        summary = probe.results.total
        values = summary.values
        times = ("latency_p50", "latency_p99", "ttft_p99", "lag_p99")
        missed = [verdict.objective.text for verdict in probe.results.verdicts if not verdict.met]
        yield (
            f"{probe.rate:.4g}",
            str(summary.requests),
            str(summary.requests - summary.succeeded),
            f"{values['requests_per_s']:.1f}",
            f"{values['goodput']:.1f}",
            *(f"{1000 * values[name]:.1f}" if name in values else "–" for name in times),
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


def _ascending(found: Found) -> list[Probe]:
    return sorted(found.probes, key=lambda probe: probe.rate)
