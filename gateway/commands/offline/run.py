"""The shared runner: reads rows, keeps a bounded number of requests in flight, and writes results in input order."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gateway.commands.errors import CommandError, Interrupted
from gateway.commands.offline.journal import Journal
from gateway.commands.offline.places import Places
from gateway.commands.offline.progress import Report
from gateway.commands.offline.rows import Row
from gateway.commands.offline.sender import Sender, Server
from gateway.commands.offline.tasks.base import Answer, Item, Refusal, RowError, Task

MAX_HELD_BYTES = 64 << 20
"""Bytes of rows and results in memory above which no further row is read."""
_MAX_REQUEST_BYTES = 1 << 20
"""Rows are put into one request up to this size."""
_WINDOW = 4
"""Requests that may be unwritten, per place: a slow request delays the output, but not the next requests."""
_CHECK_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Unit:
    """Consecutive rows that share a request, or one row that cannot be sent."""

    rows: list[Row]
    items: list[Item] = field(default_factory=list)
    problem: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(row.size for row in self.rows)


@dataclass(frozen=True, slots=True)
class Line:
    """The outcome of one row."""

    content: bytes
    failed: bool


@dataclass
class _Pending:
    """A unit whose outcome is not written yet."""

    unit: Unit
    task: asyncio.Task[list[Line]]
    held: int


@dataclass(frozen=True)
class Limits:
    """Bounds of a run."""

    concurrency: int
    retry_seconds: float


def units(rows: Iterator[Row], task: Task) -> Iterator[Unit]:
    """Group rows into requests.

    A group never crosses a multiple of ``task.rows_a_request``, so a continued run forms the same groups.
    """
    open_unit: Unit | None = None
    for row in rows:
        item: Item | None = None
        problem = row.problem
        if problem is None:
            try:
                item = task.item(row)
            except RowError as error:
                problem = str(error)
        if open_unit is not None and (item is None or not _fits(open_unit, item, task)):
            yield open_unit
            open_unit = None
        if item is None:
            yield Unit([row], problem=problem)
        elif open_unit is None:
            open_unit = Unit([row], [item])
        else:
            open_unit.rows.append(row)
            open_unit.items.append(item)
    if open_unit is not None:
        yield open_unit


def _fits(unit: Unit, item: Item, task: Task) -> bool:
    first, row = unit.items[0], item.row
    aligned = (row.number - 1) // task.rows_a_request == (first.row.number - 1) // task.rows_a_request
    return aligned and item.group == first.group and unit.size + row.size <= _MAX_REQUEST_BYTES


class RowRunner:
    """Runs a task over the rest of an input."""

    def __init__(self, task: Task, journal: Journal, report: Report, limits: Limits, check: Callable[[], None]) -> None:
        """``check`` raises :class:`CommandError` if the server has ended."""
        self._task = task
        self._journal = journal
        self._report = report
        self._limits = limits
        self._check = check
        self._places = Places(limits.concurrency)
        self._pending: deque[_Pending] = deque()
        self._held = 0
        """Bytes of the pending units and their results."""
        self._changed = asyncio.Event()
        self._stop: CommandError | None = None
        self._unreadable: CommandError | None = None
        self._position = 0

    async def run(self, server: Server, rows: Iterator[Row]) -> None:
        """Send ``rows`` and write their outcomes. Raises :class:`CommandError`; what is complete then is written."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._halt, Interrupted("interrupted; the same command continues the run"))
        watcher = asyncio.create_task(self._watch())
        try:
            async with server.client(self._limits.concurrency) as client:
                sender = Sender(client, server.url, self._places, self._limits.retry_seconds)
                await self._send_all(sender, rows)
        finally:
            watcher.cancel()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _send_all(self, sender: Sender, rows: Iterator[Row]) -> None:
        try:
            for unit in units(self._readable(rows), self._task):
                while not self._has_room():
                    await self._changed.wait()
                    self._advance()
                self._start(sender, unit)
                await asyncio.sleep(0)
                self._advance()
            while self._pending:
                await self._changed.wait()
                self._advance()
        finally:
            await self._cancel_pending()
        if self._unreadable is not None:
            raise self._unreadable

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield rows up to the first error, which is raised after the results of the rows before it are written."""
        try:
            yield from rows
        except CommandError as error:
            self._unreadable = error

    def _has_room(self) -> bool:
        if not self._pending:
            return self._places.free
        fits = len(self._pending) < _WINDOW * self._limits.concurrency and self._held < MAX_HELD_BYTES
        return fits and self._places.free

    def _start(self, sender: Sender, unit: Unit) -> None:
        self._places.busy += 1
        self._held += unit.size
        pending = _Pending(unit, asyncio.create_task(self._outcome(sender, unit)), unit.size)
        self._pending.append(pending)
        pending.task.add_done_callback(lambda task: self._on_done(pending, task))

    def _on_done(self, pending: _Pending, task: asyncio.Task[list[Line]]) -> None:
        self._places.busy -= 1
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, CommandError):
            self._halt(error)
        elif error is None:
            size = sum(len(line.content) for line in task.result())
            pending.held += size
            self._held += size
        self._changed.set()

    def _halt(self, error: CommandError) -> None:
        self._stop = self._stop or error
        self._changed.set()

    def _advance(self) -> None:
        """Write what is complete. Raises the error that stops the run."""
        self._changed.clear()
        self._write_complete()
        if self._stop is not None:
            raise self._stop

    def _write_complete(self) -> None:
        """Write the outcomes up to the first that is missing."""
        before = self._journal.rows
        while self._pending and (task := self._pending[0].task).done() and not task.cancelled():
            if isinstance(task.exception(), CommandError):
                break
            for line in task.result():
                (self._journal.failure if line.failed else self._journal.result)(line.content)
            done = self._pending.popleft()
            self._held -= done.held
            self._position = done.unit.rows[-1].position
        if self._journal.rows != before:
            self._journal.flush()
            self._report.update(self._position, self._journal.rows, self._journal.failed)

    async def _cancel_pending(self) -> None:
        tasks = [pending.task for pending in self._pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(_CHECK_SECONDS)
                self._report.update(self._position, self._journal.rows, self._journal.failed)
                try:
                    await asyncio.to_thread(self._check)
                except CommandError as error:
                    self._halt(error)

    async def _outcome(self, sender: Sender, unit: Unit) -> list[Line]:
        """Return a line for each row. If the server refuses several rows together, each is sent alone."""
        if unit.problem is not None:
            (row,) = unit.rows
            return [self._failure(row, Refusal(unit.problem))]
        answer = await self._ask(sender, unit.items)
        if not isinstance(answer, Refusal):
            return answer
        if len(unit.items) == 1:
            return [self._failure(unit.rows[0], answer)]
        lines = []
        for item in unit.items:
            alone = await self._ask(sender, [item])
            lines += [self._failure(item.row, alone)] if isinstance(alone, Refusal) else alone
        return lines

    async def _ask(self, sender: Sender, items: list[Item]) -> list[Line] | Refusal:
        answer = await sender.send(self._task.call(items))
        if isinstance(answer, Answer):
            try:
                return [Line(content, failed=False) for content in self._task.lines(items, answer)]
            except (RowError, msgspec.DecodeError, UnicodeDecodeError) as error:
                return Refusal(f"the answer cannot be used: {error}", request_id=answer.request_id)
        if self._task.stops(answer):
            hint = " Send the key with --api-key or YARDSTICK_API_KEY." if answer.status == 401 else ""
            raise CommandError(f"the server refused: {answer.message}{hint}")
        return answer

    def _failure(self, row: Row, refusal: Refusal) -> Line:
        return Line(self._task.failure(row, refusal), failed=True)
