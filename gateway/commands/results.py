"""Writes the scores of a list of items as a table, as JSON or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.commands.replace_file import replace_file


@dataclass(frozen=True)
class Results:
    """Scores in the order of the items."""

    model: str
    labels: Sequence[str]
    items: Sequence[str]
    scores: Sequence[Sequence[float]]
    """[item][label], probabilities."""
    total_tokens: int
    heading: str = "P({})"
    """Heading of a label's column in a table."""

    def by_first_label(self) -> Results:
        """Return the results sorted by the first label, best first; the order of equal ones is kept."""
        order = sorted(range(len(self.items)), key=lambda index: -self.scores[index][0])
        items, scores = [self.items[index] for index in order], [self.scores[index] for index in order]
        return replace(self, items=items, scores=scores)


def write(results: Results, format: str, output: Path | None, *, by_first_label: bool = False) -> None:
    """Write ``results`` as ``table``, ``json`` or ``csv``, to ``output`` or standard output. If ``output`` cannot be written, it
    keeps what it had. Raises :class:`CommandError`."""
    results = results.by_first_label() if by_first_label else results
    if format == "table" and output is None:
        Console().print(as_table(results))
        return
    text = {"table": _table_text, "json": _json_text, "csv": _csv_text}[format](results)
    if output is None:
        print(text, end="")
        return
    replace_file(output, text.encode())


def as_table(results: Results) -> Table:
    """Return a table with a row for each item."""
    table = Table(caption=f"{results.model}, {results.total_tokens} tokens", caption_justify="left")
    table.add_column("Item", overflow="fold")
    for label in results.labels:
        table.add_column(Text(results.heading.format(label.strip() or repr(label))), justify="right")
    for item, scores in zip(results.items, results.scores, strict=True):
        table.add_row(Text(item), *(f"{score:.4f}" for score in scores))
    return table


def _table_text(results: Results) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(as_table(results))
    return capture.get()


def _json_text(results: Results) -> str:
    rows = [
        {"item": item, "scores": dict(zip(results.labels, scores, strict=True))}
        for item, scores in zip(results.items, results.scores, strict=True)
    ]
    document = {"model": results.model, "labels": results.labels, "results": rows, "total_tokens": results.total_tokens}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _csv_text(results: Results) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["item", *results.labels])
    writer.writerows([item, *scores] for item, scores in zip(results.items, results.scores, strict=True))
    return lines.getvalue()
