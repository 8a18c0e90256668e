"""The table of :mod:`benchmarks.engine.accuracy`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from benchmarks.engine.records import Records


def show(title: str, formats: Mapping[str, Mapping[str, float | None]], records: Records) -> None:
    """Print one row per format."""
    headings = {
        "mean": "mean Δ",
        "largest": "max Δ",
        "batch": "max Δ, batch",
        "auc": "AUC",
        "same_next": "same next token",
        "same_texts": "same text",
        "correlation": "rank correlation",
    }
    first = next(iter(formats.values()), {})
    table = Table(title, *(heading for key, heading in headings.items() if first.get(key) is not None))
    for form, cost in formats.items():
        table.add_row(form, *(_written(key, cost[key]) for key in headings if cost.get(key) is not None))
    records.console.print(table)


def _written(key: str, value: float | None) -> str:
    assert value is not None
    return f"{value:.1%}" if key.startswith("same") else f"{value:.4f}" if key in ("auc", "correlation") else f"{value:.1e}"
