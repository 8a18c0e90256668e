"""``yardstick catalogue``: loads, describes and deletes the catalogues of a gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from gateway.commands.errors import CommandError, Interrupted, WrongUsage
from gateway.commands.offline.places import Places
from gateway.commands.offline.progress import Report
from gateway.commands.offline.rows import Row, open_source
from gateway.commands.offline.sender import Sender, Server
from gateway.commands.offline.tasks.base import Call, Refusal
from gateway.errors import ErrorBody
from gateway.schemas.catalogue import CatalogueItem, DeletedCatalogue, RegisteredItems

MAX_REQUEST_BYTES = 1 << 20
"""Most bytes of the items of a request, and so of their tokens: gateways accept as many by default."""
T = TypeVar("T")


class _CatalogueState(msgspec.Struct):
    """A field that the state of a catalogue has, and the JSON of another server has not."""

    object: Literal["catalogue"]


@dataclass(frozen=True)
class Access:
    """A gateway, and the key for it."""

    url: str
    api_key: str | None


@dataclass(frozen=True)
class Form:
    """The properties of a new catalogue; None is the server's default."""

    model: str | None
    template: list[str] | None
    labels: list[str] | None
    ttl_seconds: float | None
    preset: bool | None = None


@dataclass(frozen=True)
class Load:
    """Options of the command line."""

    file: Path
    catalogue: str
    url: str
    api_key: str | None
    form: Form
    id_column: str
    text_column: str
    batch: int
    concurrency: int
    retry_seconds: float
    start_row: int


@dataclass(frozen=True)
class _Batch:
    rows: list[Row]
    body: bytes


def load(options: Load) -> None:
    """Register the items of a file, with progress on standard error. Raises :class:`CommandError`."""
    source = open_source(options.file)
    with Report("Loading", source.total) as report:
        loading = _Loading(options, report)
        try:
            asyncio.run(loading.run(_batches(options, source.rows([options.id_column, options.text_column]))))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {loading.remedy}") from None
    print(f"{options.catalogue}: {loading.added} added, {loading.changed} changed, {loading.unchanged} unchanged", file=sys.stderr)


class _Loading:
    """A load in progress."""

    def __init__(self, options: Load, report: Report) -> None:
        self._options = options
        self._report = report
        self._places = Places(options.concurrency)
        self._open: dict[int, int] = {}
        """First row of each request in flight, by the number of the request."""
        self._next_row = options.start_row
        self.added = self.changed = self.unchanged = 0

    @property
    def remedy(self) -> str:
        """How to continue."""
        row = min(self._open.values(), default=self._next_row)
        return f"rows before {row} are registered; continue with --start-row {row}"

    async def run(self, batches: Iterator[_Batch]) -> None:
        """Send all batches. Raises :class:`CommandError`."""
        options = self._options
        async with Server(options.url, options.api_key).client(options.concurrency) as client:
            sender = Sender(client, options.url, self._places, options.retry_seconds)
            await self._create(sender)
            tasks: set[asyncio.Task[None]] = set()
            try:
                for number, batch in enumerate(batches):
                    while not self._places.free:
                        await self._any(tasks)
                    self._open[number] = batch.rows[0].number
                    self._next_row = batch.rows[-1].number + 1
                    self._places.busy += 1
                    tasks.add(asyncio.create_task(self._register(sender, number, batch)))
                while tasks:
                    await self._any(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _create(self, sender: Sender) -> None:
        """Create the catalogue, unless it exists and the options leave its form open."""
        path = _path(self._options.catalogue)
        given = {name: value for name, value in vars(self._options.form).items() if value is not None}
        if not given and not isinstance(await sender.send(Call(path, b"", "GET")), Refusal):
            return
        await self._ask(sender, Call(path, msgspec.json.encode(given), "PUT"))

    async def _any(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait until a request has ended. Raises its error."""
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks -= done
        for task in done:
            task.result()

    async def _register(self, sender: Sender, number: int, batch: _Batch) -> None:
        try:
            content = await self._ask(sender, Call(f"{_path(self._options.catalogue)}/items", batch.body, "PUT"), batch)
        finally:
            self._places.busy -= 1
        answer = _decoded(content, RegisteredItems, self._options.url)
        del self._open[number]
        self.added += answer.added
        self.changed += answer.changed
        self.unchanged += answer.unchanged
        self._report.update(batch.rows[-1].position, self.added + self.changed + self.unchanged, 0)

    async def _ask(self, sender: Sender, call: Call, batch: _Batch | None = None) -> bytes:
        answer = await sender.send(call)
        if not isinstance(answer, Refusal):
            return answer.content
        if batch is None:
            raise CommandError(f"the server refused: {answer.message}")
        rows = f"rows {batch.rows[0].number} to {batch.rows[-1].number}"
        raise CommandError(f"{rows}: the server refused: {answer.message} {self.remedy}")


def _batches(options: Load, rows: Iterator[Row]) -> Iterator[_Batch]:
    """Group rows into requests. Raises :class:`CommandError` for a row that cannot be read."""
    batch: list[Row] = []
    lines: list[bytes] = []
    size = 0
    for row in rows:
        if row.number < options.start_row:
            continue
        line = _line(options, row)
        if batch and (len(batch) == options.batch or size + len(line) > MAX_REQUEST_BYTES):
            yield _Batch(batch, b"\n".join(lines))
            batch, lines, size = [], [], 0
        batch.append(row)
        lines.append(line)
        size += len(line) + 1
    if batch:
        yield _Batch(batch, b"\n".join(lines))


def _line(options: Load, row: Row) -> bytes:
    if row.problem is not None:
        raise CommandError(f"{options.file}, row {row.number}: {row.problem}")
    values: list[Any] = []
    for column in (options.id_column, options.text_column):
        value = row.fields.get(column)
        if not isinstance(value, str | int):
            raise CommandError(f"{options.file}, row {row.number}: the column {column!r} holds no text")
        values.append(str(value))
    try:
        return msgspec.json.encode(msgspec.convert({"id": values[0], "text": values[1]}, CatalogueItem))
    except msgspec.ValidationError as error:
        raise CommandError(f"{options.file}, row {row.number}: {error}") from None


def status(access: Access, catalogue: str) -> None:
    """Print a catalogue's state. Raises :class:`CommandError`."""
    content = _plain(access, "GET", _path(catalogue))
    _decoded(content, _CatalogueState, access.url)
    print(msgspec.json.format(content).decode())


def delete(access: Access, catalogue: str) -> None:
    """Delete a catalogue. Raises :class:`CommandError`."""
    _decoded(_plain(access, "DELETE", _path(catalogue)), DeletedCatalogue, access.url)
    print(f"{catalogue} is deleted", file=sys.stderr)


def _plain(access: Access, method: str, path: str) -> bytes:
    with _client(access) as client:
        try:
            response = client.request(method, path)
        except httpx.RequestError as error:
            raise _unanswered(access, error) from None
    if not response.is_success:
        raise CommandError(_refusal(response))
    return response.content


def _decoded(content: bytes, kind: type[T], url: str) -> T:
    """Decode an answer of a gateway. Raises :class:`CommandError` for one of another server."""
    try:
        return msgspec.json.decode(content, type=kind)
    except ValueError:  # also of bytes that are not UTF-8
        raise CommandError(f"{url} did not answer as a Yardstick gateway does; check --url") from None


def _unanswered(access: Access, error: httpx.RequestError) -> CommandError:
    return CommandError(f"no answer from {access.url} ({_named(error)}); check --url")


def _named(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__


def _client(access: Access) -> httpx.Client:
    headers = {"authorization": f"Bearer {access.api_key}"} if access.api_key else {}
    try:
        return httpx.Client(base_url=access.url, headers=headers, timeout=httpx.Timeout(600.0, connect=5.0))
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise WrongUsage(f"--url or --api-key cannot be used ({error}); check for typing errors") from None


def _refusal(response: httpx.Response) -> str:
    try:
        return f"the server refused: {msgspec.json.decode(response.content, type=ErrorBody).error.message}"
    except ValueError:
        return f"the server refused with HTTP status {response.status_code}"


def _path(catalogue: str) -> str:
    return f"/v1/catalogues/{quote(catalogue, safe='')}"
