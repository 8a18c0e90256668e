"""Compares two runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.report import TIME_NAMES, WIDTH
from loadgen.statistics import Results

_RATES = {
    "requests_per_s": "requests/s",
    "goodput": "goodput/s",
    "items_per_s": "items/s",
    "tokens_per_s": "tokens/s",
    "failures": "failures",
    "cache_hit_rate": "cache hit rate",
}
_TIMES = {
    f"{name}_{what}": f"{title}, {what.upper() if what != 'max' else what} ms"
    for name, title in TIME_NAMES.items()
    for what in ("p50", "p90", "p99", "max")
}


def show(first: Results, second: Results, names: tuple[str, str]) -> None:
    """Print measures, ratios (second to first) and other differences; the last line is JSON."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table()
    for place, heading in enumerate(("", *names, "ratio")):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for title, values in _rows(first, second):
        table.add_row(title, *(f"{value:.2f}" for value in values), f"{values[1] / values[0]:.3f}" if values[0] else "–")
    console.print(table)
    differences = dict(differing(_facts(first), _facts(second)))
    for key, values in differences.items():
        console.print(Text(f"! {key} differs: {values[0]} and {values[1]}"))
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


def _rows(first: Results, second: Results) -> Iterator[tuple[str, tuple[float, float]]]:
    for names, factor in ((_RATES, 1.0), (_TIMES, 1000.0)):
        for name, title in names.items():
            if name in first.total.values and name in second.total.values:
                yield title, (factor * first.total.values[name], factor * second.total.values[name])


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
