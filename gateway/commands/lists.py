"""``yardstick score --items`` and ``rerank --documents``: one list on a running gateway, written as a table, as JSON or as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands.client import Report, Sender, Server, decoded
from yardstick_llm.gateway.commands.files import Row, replace_file
from yardstick_llm.gateway.commands.runner import Item, Rerank, Score


@dataclass(frozen=True)
class Results:
    """Scores of items."""

    model: str
    labels: Sequence[str]
    items: Sequence[str]
    scores: Sequence[Sequence[float]]
    """[item][label]"""
    total_tokens: int
    heading: str = "P({})"
    """Heading of a label's column in a table."""

    def best(self, count: int | None = None) -> Results:
        """Return the results sorted by the first label, best first, all or ``count``; the order of equal ones is kept."""
        order = sorted(range(len(self.items)), key=lambda index: -self.scores[index][0])[:count]
        return replace(self, items=[self.items[index] for index in order], scores=[self.scores[index] for index in order])


class _Usage(msgspec.Struct):
    total_tokens: int


class _Described(msgspec.Struct):
    model: str
    usage: _Usage


def read_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that are not empty. Raises :class:`CommandError`."""
    try:
        items = [item for line in lines if (item := line.rstrip("\r\n"))]
    except UnicodeDecodeError as error:
        raise CommandError(f"the items are not UTF-8 text (byte {error.start}); convert the file first") from None
    if not items:
        raise CommandError("there are no items to score; give a file with one item a line")
    return items


def compute(task: Score | Rerank, server: Server, items: Sequence[str]) -> Results:
    """Return the results of ``items`` in their order, with a progress bar on standard error. Raises :class:`CommandError`."""
    return asyncio.run(_compute(task, server, items))


async def _compute(task: Score | Rerank, server: Server, items: Sequence[str]) -> Results:
    results: list[Sequence[float] | float] = []
    model, tokens = "", 0
    with Report(f"yardstick {task.command}", len(items)) as report:
        async with Sender(server, 1) as sender:
            for start in range(0, len(items), task.batch):
                batch = items[start : start + task.batch]
                answer = (await sender.send(task.call([Item(Row(0, {}, 0, 0), batch, task.query)]))).usable()
                described = decoded(answer, _Described, server.url)
                model, tokens = described.model, tokens + described.usage.total_tokens
                results += task.decode(answer)
                report.update(len(results), len(items), f"{len(results)} of {len(items)}")
    if isinstance(task, Score):
        return Results(model, task.constant["labels"], items, results, tokens)  # type: ignore[arg-type]
    return Results(model, ("relevance",), items, [[score] for score in results], tokens, heading="{}")  # type: ignore[list-item]


def write(results: Results, format: str, output: Path | None) -> None:
    """Write ``results`` as ``table``, ``json`` or ``csv``, to ``output`` or standard output. If ``output`` cannot be written, it
    keeps what it had. Raises :class:`CommandError`."""
    text = io.StringIO()
    if format == "table":
        Console(file=None if output is None else text, width=None if output is None else 120).print(as_table(results))
    elif format == "csv":
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["item", *results.labels])
        writer.writerows([item, *scores] for item, scores in zip(results.items, results.scores, strict=True))
    else:
        pairs = zip(results.items, results.scores, strict=True)
        rows = [{"item": item, "scores": dict(zip(results.labels, scores, strict=True))} for item, scores in pairs]
        document = {"model": results.model, "labels": results.labels, "results": rows, "total_tokens": results.total_tokens}
        text.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
    if output is None:
        print(text.getvalue(), end="")
    else:
        replace_file(output, text.getvalue().encode())


def as_table(results: Results) -> Table:
    """Return a table with a row for each item."""
    table = Table(caption=f"{results.model}, {results.total_tokens} tokens", caption_justify="left")
    table.add_column("Item", overflow="fold")
    for label in results.labels:
        table.add_column(Text(results.heading.format(label.strip() or repr(label))), justify="right")
    for item, scores in zip(results.items, results.scores, strict=True):
        table.add_row(Text(item), *(f"{score:.4f}" for score in scores))
    return table
