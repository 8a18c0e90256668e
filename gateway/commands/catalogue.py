"""``yardstick catalogue``: loads, describes and deletes the catalogues of a gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands.client import Call, Report, Sender, Server, decoded
from yardstick_llm.gateway.commands.files import Row, open_source

MAX_REQUEST_BYTES = 1 << 20
"""Most bytes of the items of a request, and so of their tokens: gateways accept as many by default."""
_AGAIN = "the same command continues it"


class _State(msgspec.Struct):
    """A field that the state of a catalogue has, and the JSON of another server has not."""

    object: Literal["catalogue"]


class _Registered(msgspec.Struct):
    added: int
    changed: int
    unchanged: int


class _Deleted(msgspec.Struct):
    deleted: bool


class _Batch(NamedTuple):
    rows: list[Row]
    body: bytes


class Columns(NamedTuple):
    """Columns of a file of items."""

    id: str
    text: str


def load(
    server: Server, catalogue: str, file: Path, form: Mapping[str, Any], columns: Columns, *, batch: int, concurrency: int
) -> None:
    """Register the items of a file, with progress on standard error. ``form``: properties of a new catalogue.

    Raises :class:`CommandError`.
    """
    asyncio.run(_load(server, catalogue, file, form, columns, batch, concurrency))


async def _load(
    server: Server, catalogue: str, file: Path, form: Mapping[str, Any], columns: Columns, batch: int, concurrency: int
) -> None:
    source, path = open_source(file), _path(catalogue)
    counts = {"added": 0, "changed": 0, "unchanged": 0}
    places = asyncio.Semaphore(concurrency)

    async def register(items: _Batch) -> None:
        try:
            answer = await sender.send(Call(f"{path}/items", items.body, "PUT"))
        finally:
            places.release()
        if answer.problem is not None:
            rows = f"rows {items.rows[0].number} to {items.rows[-1].number}"
            raise CommandError(f"{rows}: the server refused: {answer.problem} Once that is solved, {_AGAIN}.")
        registered = decoded(answer.content, _Registered, server.url)
        for name in counts:
            counts[name] += getattr(registered, name)
        report.update(items.rows[-1].position, source.total, f"{sum(counts.values())} items")

    with Report("Loading", source.total) as report:
        async with Sender(server, concurrency) as sender:
            # a catalogue that exists needs no form
            if form or (await sender.send(Call(path, method="GET"))).problem is not None:
                (await sender.send(Call(path, msgspec.json.encode(form), "PUT"))).usable()
            try:
                async with asyncio.TaskGroup() as group:
                    for items in _batches(file, source.rows(columns), columns, batch):
                        await places.acquire()
                        group.create_task(register(items))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
    print(f"{catalogue}: {', '.join(f'{count} {name}' for name, count in counts.items())}", file=sys.stderr)


def _batches(file: Path, rows: Iterator[Row], columns: Columns, most: int) -> Iterator[_Batch]:
    """Group rows into requests. Raises :class:`CommandError` for a row that cannot be read."""
    batch: list[Row] = []
    lines: list[bytes] = []
    size = 0
    for row in rows:
        if row.problem is not None:
            raise CommandError(f"{file}, row {row.number}: {row.problem}")
        for column in columns:
            if not isinstance(row.fields.get(column), str | int):
                raise CommandError(f"{file}, row {row.number}: the column {column!r} holds no text")
        line = msgspec.json.encode({"id": str(row.fields[columns.id]), "text": str(row.fields[columns.text])})
        if batch and (len(batch) == most or size + len(line) > MAX_REQUEST_BYTES):
            yield _Batch(batch, b"\n".join(lines))
            batch, lines, size = [], [], 0
        batch.append(row)
        lines.append(line)
        size += len(line) + 1
    if batch:
        yield _Batch(batch, b"\n".join(lines))


def status(server: Server, catalogue: str) -> None:
    """Print a catalogue's state. Raises :class:`CommandError`."""
    content = asyncio.run(_ask(server, Call(_path(catalogue), method="GET")))
    decoded(content, _State, server.url)
    print(msgspec.json.format(content).decode())


def delete(server: Server, catalogue: str) -> None:
    """Delete a catalogue. Raises :class:`CommandError`."""
    decoded(asyncio.run(_ask(server, Call(_path(catalogue), method="DELETE"))), _Deleted, server.url)
    print(f"{catalogue} is deleted", file=sys.stderr)


async def _ask(server: Server, call: Call) -> bytes:
    async with Sender(server, 1) as sender:
        return (await sender.send(call)).usable()


def _path(catalogue: str) -> str:
    return f"/v1/catalogues/{quote(catalogue, safe='')}"
