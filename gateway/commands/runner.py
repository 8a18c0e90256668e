"""The commands ``score``, ``rerank``, ``embed`` and ``batch`` for the rows of a file.

Each row of the input becomes one line of the output, in the same order, so the number of lines says where an interrupted run
continues.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from yardstick_llm.gateway.commands import CommandError, Interrupted, WrongUsage
from yardstick_llm.gateway.commands.client import Answer, Call, Report, Sender, Server
from yardstick_llm.gateway.commands.files import (
    FORMATS,
    Row,
    Source,
    UnreadableInput,
    import_arrow,
    open_source,
    reason_of,
    write_table,
)

MAX_HELD_BYTES = 64 << 20
"""Bytes of rows and results in memory above which no further row is read."""
_MAX_REQUEST_BYTES = 1 << 20
"""Rows are put into one request up to this size."""
_WINDOW = 4
"""Requests that may be unwritten, for each place: a slow request delays the output, but not the next requests."""
_SYNC_SECONDS = 10.0
"""Time between two calls of fsync, which may take longer than computing the rows between them."""
_NOT_OURS = "{} exists and is no output of this command with these columns; remove it, or name another --output"
_SUCCEEDED = b'"error":null}\n'
"""End of the output line of a row that did not fail."""


class RowError(Exception):
    """One row cannot be sent, or has no usable answer. The message is for the user."""


class Refused(Exception):
    """The server refused a request, or did not answer it."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.problem)
        self.answer = answer


async def accepted(call: Call, sender: Sender) -> Answer:
    """Return the answer to a request. Raises :class:`Refused`, and :class:`CommandError` as :meth:`Sender.send` does."""
    answer = await sender.send(call)
    if answer.problem is not None:
        raise Refused(answer)
    return answer


class Item(NamedTuple):
    """A row that is ready to be sent, or cannot be."""

    row: Row
    content: Any = None
    """Its texts, or the request of a batch file."""
    query: str | None = None
    problem: str | None = None
    """Why it cannot be sent."""


class Task(ABC):
    """Defines the rows that a command reads, the requests that it sends, and the lines that it writes."""

    command: ClassVar[str]
    head: ClassVar[bytes] = b'{"row":%d,'
    """Beginning of the output line of a row."""
    types: Mapping[str, str | None]
    """Columns of the output and their types, as :func:`~gateway.commands.files.write_table` takes them; ``error`` is the last."""
    read: Sequence[str] = ()
    """Columns of the input that are needed."""
    batch: int = 1
    """Most rows that share a request."""
    one_query: ClassVar[bool] = False
    """Whether only rows with the same query share a request."""
    ordered: ClassVar[bool] = True
    """Whether lines are written in the order of the rows; otherwise each as soon as it is there."""

    def bind(self, source: Source) -> None:  # noqa: B027 - a batch file has fixed columns
        """Choose columns of the input. Raises :class:`WrongUsage`."""

    @abstractmethod
    def item(self, row: Row) -> Item:
        """Check a row. Raises :class:`RowError`."""

    @abstractmethod
    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        """Send the requests for ``items`` and return the output line of each. Raises :class:`Refused`, :class:`CommandError`, and
        :class:`RowError` or ValueError if an answer cannot be used."""

    @abstractmethod
    def failure(self, row: Row, answer: Answer) -> bytes:
        """Return the output line of a row that failed."""

    def stops(self, answer: Answer) -> bool:
        """Whether every other row would be refused too."""
        return answer.status in (401, 403)

    def keeps(self, line: bytes, number: int, path: Path) -> bool:
        """Whether ``line`` of an earlier run is complete, the ``number``-th. Raises :class:`WrongUsage` for another command's."""
        head = self.head % number
        complete = line.startswith(head) and line.endswith(b"}\n")
        if number == 1 and (_names(line) != [*self.types] if complete else not head.startswith(line[: len(head)])):
            raise WrongUsage(_NOT_OURS.format(path))
        return complete


@dataclass
class TableTask(Task):
    """Texts, or lists of texts, whose results are columns of a table."""

    constant: Mapping[str, Any]
    """Fields of every request body."""
    batch: int = 32
    keep: Sequence[str] = ()
    """Columns of the input that the output repeats."""
    texts_column: str | None = None
    """Column of lists; each list has a request of its own."""
    text_column: str = "text"
    """Column of single texts of an input without lists."""
    query_column: str | None = None
    query: str | None = None
    """The query of all rows, if no column has it."""
    lists: bool = False

    path: ClassVar[str]

    @property
    @abstractmethod
    def result(self) -> tuple[str, str]:
        """Column and Parquet type of the results of a row."""

    @abstractmethod
    def body(self, queries: Sequence[str | None], texts: Sequence[str]) -> dict[str, Any]:
        """Return the varying fields of a request for texts with the query of each."""

    @abstractmethod
    def decode(self, content: bytes) -> Sequence[Any]:
        """Return the result of each text of an answer. Raises ValueError."""

    def bind(self, source: Source) -> None:
        self.lists = self.texts_column in source.columns
        texts = self.texts_column if self.lists else self.text_column
        shown = ", ".join(map(repr, source.columns[:20])) + (" and others" if len(source.columns) > 20 else "")
        for name in filter(None, (texts, self.query_column)):
            if name not in source.columns:
                either = f"{self.texts_column!r} or " if self.texts_column and name == texts else ""
                raise WrongUsage(
                    f"the input has no column {either}{name!r}; it has {shown}; options such as --query-column name others"
                )
        for name in self.keep:
            if name not in source.columns:
                raise WrongUsage(f"there is no column {name!r} to keep; the input has {shown}")
            if name in ("row", self.result[0], "error"):
                raise WrongUsage(f"the column {name!r} cannot be kept, because the output has its own column of this name")
        self.batch = 1 if self.lists else self.batch
        self.read = [name for name in (texts, self.query_column, *self.keep) if name]
        self.types = {"row": "int", **dict.fromkeys(self.keep), self.result[0]: self.result[1], "error": "str"}

    def item(self, row: Row) -> Item:
        query = self.query if self.query_column is None else _text(row, self.query_column)
        if not self.lists:
            return Item(row, [_text(row, self.text_column)], query)
        return Item(row, _texts(row, self.texts_column or ""), query)

    def call(self, items: Sequence[Item]) -> Call:
        """Return the request for ``items``."""
        pairs = [(item.query, text) for item in items for text in item.content]
        fields = self.body([query for query, _ in pairs], [text for _, text in pairs])
        return Call(self.path, msgspec.json.encode({**self.constant, **fields}))

    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        answer = await accepted(self.call(items), sender)
        results, count = self.decode(answer.content), sum(len(item.content) for item in items)
        if len(results) != count:
            raise RowError(f"it has {len(results)} results for {count} texts")
        if self.lists:
            return [self._line(items[0].row, results, None)]
        return [self._line(item.row, result, None) for item, result in zip(items, results, strict=True)]

    def failure(self, row: Row, answer: Answer) -> bytes:
        details = ", ".join(str(detail) for detail in (answer.status and f"HTTP status {answer.status}", answer.code) if detail)
        return self._line(row, None, f"{answer.problem} ({details})" if details else answer.problem)

    def stops(self, answer: Answer) -> bool:
        name = (answer.param or "").partition("[")[0]
        return super().stops(answer) or answer.status == 404 or name == "model" or name in self.constant

    def _line(self, row: Row, result: Any, error: str | None) -> bytes:
        kept = {name: row.fields.get(name) for name in self.keep}
        return _encoded({"row": row.number, **kept, self.result[0]: result, "error": error})


class _Scores(msgspec.Struct):
    scores: list[list[float]]


class _Likelihood(msgspec.Struct):
    logprob: float
    mean_logprob: float
    tokens: int
    is_greedy: bool


class _Likelihoods(msgspec.Struct):
    data: list[_Likelihood]


@dataclass
class Score(TableTask):
    """The probabilities of labels after a query and an item, or the likelihood of each item."""

    suffix: str = ""
    command, path, one_query = "score", "/v1/score", True

    @property
    def result(self) -> tuple[str, str]:
        if "readout" in self.constant:
            return ("likelihoods", "[likelihood]") if self.lists else ("likelihood", "likelihood")
        return "scores", "[[float]]" if self.lists else "[float]"

    def body(self, queries: Sequence[str | None], texts: Sequence[str]) -> dict[str, Any]:
        return {"query": queries[0], "items": [text + self.suffix for text in texts]}

    def decode(self, content: bytes) -> Sequence[Any]:
        if "readout" in self.constant:
            return msgspec.json.decode(content, type=_Likelihoods).data
        return msgspec.json.decode(content, type=_Scores).scores


class _Pair(msgspec.Struct):
    index: int
    score: float


class _Pairs(msgspec.Struct):
    data: list[_Pair]


@dataclass
class Rerank(TableTask):
    """The relevance of documents to a query."""

    command, path = "rerank", "/v1/score"

    @property
    def result(self) -> tuple[str, str]:
        return ("scores", "[float]") if self.lists else ("score", "float")

    def body(self, queries: Sequence[str | None], texts: Sequence[str]) -> dict[str, Any]:
        # one query for all documents is computed once
        return {"queries": queries[0] if len(set(queries)) == 1 else queries, "documents": texts}

    def decode(self, content: bytes) -> Sequence[Any]:
        return [pair.score for pair in sorted(msgspec.json.decode(content, type=_Pairs).data, key=lambda pair: pair.index)]


class _Entry(msgspec.Struct):
    index: int
    embedding: msgspec.Raw
    """Numbers as the server wrote them."""


class _Entries(msgspec.Struct):
    data: list[_Entry]


@dataclass
class Embed(TableTask):
    """Embeddings of texts."""

    command, path = "embed", "/v1/embeddings"

    @property
    def result(self) -> tuple[str, str]:
        return "embedding", "[float32]"

    def body(self, queries: Sequence[str | None], texts: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - there are none
        return {"input": texts}

    def decode(self, content: bytes) -> Sequence[Any]:
        return [
            entry.embedding for entry in sorted(msgspec.json.decode(content, type=_Entries).data, key=lambda entry: entry.index)
        ]


class _Request(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class Batch(Task):
    """OpenAI's batch files: a request in each row, whose answer is written as OpenAI's batch API does."""

    command = "batch"
    head = b'{"id":"batch_req_%d",'
    types = dict.fromkeys(("id", "custom_id", "response", "error"))

    def item(self, row: Row) -> Item:
        try:
            request = msgspec.convert(row.fields, _Request)
        except msgspec.ValidationError as error:
            raise RowError(f"not a request of a batch file: {error}") from None
        if request.method != "POST":
            raise RowError(f"the method is {request.method!r}; only POST is supported")
        if not request.url.startswith("/") or request.url.startswith("//"):
            raise RowError(f"the url is {request.url[:200]!r}; give a path such as /v1/chat/completions")
        if request.body.get("stream"):
            raise RowError("`stream` is not supported in a batch file")
        return Item(row, request)

    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        request = items[0].content
        answer = await accepted(Call(request.url, msgspec.json.encode(request.body)), sender)
        return [self._line(items[0].row, answer, msgspec.json.decode(answer.content), None)]

    def failure(self, row: Row, answer: Answer) -> bytes:
        error = {"code": answer.code, "message": answer.problem}
        try:
            body = msgspec.json.decode(answer.content)
        except ValueError:
            body = {"error": error}
        return self._line(row, answer, body, error)

    def _line(self, row: Row, answer: Answer, body: Any, error: dict[str, Any] | None) -> bytes:
        answered = {"status_code": answer.status, "request_id": answer.request_id, "body": body} if answer.status else None
        fields = {"custom_id": row.fields.get("custom_id"), "response": answered, "error": error}
        return _encoded({"id": f"batch_req_{row.number}", **fields})


def _text(row: Row, column: str) -> str:
    value = row.fields.get(column)
    if not isinstance(value, str):
        raise RowError(f"no column {column!r}" if value is None else f"column {column!r} is not a text")
    return value


def _texts(row: Row, column: str) -> list[str]:
    """Return the list of texts of a column, which in CSV is written as JSON."""
    value = row.fields.get(column)
    if value is None:
        raise RowError(f"no column {column!r}")
    try:
        texts = msgspec.json.decode(value, type=list[str]) if isinstance(value, str) else msgspec.convert(value, list[str])
    except ValueError:
        raise RowError(f"column {column!r} is not a list of texts") from None
    if not texts:
        raise RowError(f"column {column!r} is empty")
    return texts


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields, enc_hook=str) + b"\n"


class Output:
    """The lines of an output, one for each row. Those of an earlier run are kept, except a part of a line at the end."""

    def __init__(self, path: Path, task: Task) -> None:
        """Open or create the file for this process alone. Raises :class:`CommandError`."""
        self._path = path
        self.rows = self.failed = self._size = 0
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._synced = time.monotonic()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._keep_complete(task)
        except BlockingIOError:
            self._file.close()
            raise WrongUsage(f"another run writes to {path}") from None
        except WrongUsage:
            self._file.close()
            raise

    def _keep_complete(self, task: Task) -> None:
        """Count the complete lines, and cut off everything behind them."""
        with self._path.open("rb") as stream:
            for line in stream:
                if not task.keeps(line, self.rows + 1, self._path):
                    break
                self.rows += 1
                self.failed += not line.endswith(_SUCCEEDED)
                self._size += len(line)
        self._file.truncate(self._size)

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines. If not all fit, none stays. Raises :class:`CommandError`."""
        content = memoryview(b"".join(lines))
        size = len(content)
        try:
            while content:
                content = content[self._file.write(content) :]
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            self._file.truncate(self._size)
            raise _cannot_write(self._path, error) from None
        self._size += size
        self.rows += len(lines)
        self.failed += sum(not line.endswith(_SUCCEEDED) for line in lines)

    def close(self) -> None:
        """Let the disk store all lines. Raises :class:`CommandError`."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _cannot_write(self._path, error) from None
        finally:
            self._file.close()


def _names(line: bytes) -> list[str]:
    try:
        return [*msgspec.json.decode(line, type=dict[str, Any])]
    except ValueError:
        return []


def _cannot_write(path: Path, error: OSError) -> CommandError:
    return CommandError(f"cannot write {path}: {reason_of(error)}; the same command continues the run once that is solved")


def units(rows: Iterator[Row], task: Task) -> Iterator[list[Item]]:
    """Group rows into requests; one that cannot be sent is alone. A group never crosses a multiple of ``task.batch``, so a
    continued run forms the same groups."""
    unit: list[Item] = []
    size = 0
    for row in rows:
        try:
            item = task.item(row) if row.problem is None else Item(row, problem=row.problem)
        except RowError as error:
            item = Item(row, problem=str(error))
        if unit and (size + row.size > _MAX_REQUEST_BYTES or not _share_request(unit[0], item, task)):
            yield unit
            unit, size = [], 0
        unit.append(item)
        size += row.size
    if unit:
        yield unit


def _share_request(first: Item, item: Item, task: Task) -> bool:
    """Whether ``item`` may be in one request with ``first``."""
    if item.problem is not None or first.problem is not None or (task.one_query and item.query != first.query):
        return False
    return (item.row.number - 1) // task.batch == (first.row.number - 1) // task.batch


def _size(unit: Sequence[Item]) -> int:
    return sum(item.row.size for item in unit)


def _readable(rows: Iterator[Row], errors: list[UnreadableInput]) -> Iterator[Row]:
    """Yield rows up to the first error, which is added to ``errors``."""
    try:
        yield from rows
    except UnreadableInput as error:
        errors.append(error)


def _has_lines(task: asyncio.Task[list[bytes]]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class Run:
    """Sends the rows that an output lacks, and writes their lines in order."""

    def __init__(self, task: Task, sender: Sender, output: Output, total: int, report: Report) -> None:
        """``total``: position of the input's last row."""
        self._task = task
        self._sender = sender
        self._output = output
        self._total = total
        self._report = report
        self._pending: deque[tuple[list[Item], asyncio.Task[list[bytes]]]] = deque()
        """Units whose lines are not written yet."""
        self._held = 0
        """Bytes of their rows and lines."""

    async def run(self, rows: Iterator[Row], window: int) -> None:
        """Process ``rows``, with up to ``window`` unwritten requests. Raises :class:`CommandError`; what is complete then is
        written."""
        this = asyncio.current_task()
        assert this is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        try:
            async with self._sender, asyncio.TaskGroup() as group:
                try:
                    await self._start_all(group, rows, window)
                finally:
                    self._write_complete()
        except asyncio.CancelledError:
            raise Interrupted("interrupted; the same command continues the run") from None
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _start_all(self, group: asyncio.TaskGroup, rows: Iterator[Row], window: int) -> None:
        unreadable: list[UnreadableInput] = []
        for unit in units(_readable(rows, unreadable), self._task):
            while self._pending and (len(self._pending) >= window or self._held >= MAX_HELD_BYTES):
                await self._next_end()
                self._write_complete()
            self._held += _size(unit)
            self._pending.append((unit, group.create_task(self._answered(unit))))
            await asyncio.sleep(0)
            self._write_complete()
        while self._pending:
            await self._next_end()
            self._write_complete()
        if unreadable:
            raise unreadable[0]

    async def _next_end(self) -> None:
        """Wait until there are lines to write."""
        if self._task.ordered:
            await self._pending[0][1]
        else:
            await asyncio.wait([task for _, task in self._pending], return_when=asyncio.FIRST_COMPLETED)

    def _write_complete(self) -> None:
        """Write the lines up to the first that is missing; those of a task without order all."""
        before = self._output.rows
        if not self._task.ordered:
            self._pending = deque(sorted(self._pending, key=lambda entry: not _has_lines(entry[1])))
        while self._pending and _has_lines(task := self._pending[0][1]):
            unit, lines = self._pending[0][0], task.result()
            self._output.write(lines)
            self._pending.popleft()
            self._held -= _size(unit) + sum(map(len, lines))
        if self._output.rows != before:
            counts = f"{self._output.rows} rows, {self._output.failed} failed"
            self._report.update(unit[-1].row.position if self._task.ordered else self._output.rows, self._total, counts)

    async def _answered(self, unit: list[Item]) -> list[bytes]:
        lines = await self._lines(unit)
        self._held += sum(map(len, lines))
        return lines

    async def _lines(self, unit: list[Item]) -> list[bytes]:
        """Return a line for each row. If the server refuses several rows together, each is sent alone."""
        if unit[0].problem is not None:
            return [self._task.failure(unit[0].row, Answer(problem=unit[0].problem))]
        try:
            return await self._task.compute(unit, self._sender)
        except Refused as refused:
            answer = refused.answer
            if self._task.stops(answer):
                raise CommandError(f"the server refused: {answer.problem}") from None
        except (RowError, ValueError) as error:
            answer = Answer(problem=f"the answer cannot be used: {error}")
        if len(unit) == 1:
            return [self._task.failure(unit[0].row, answer)]
        return [line for item in unit for line in await self._lines([item])]


def execute(
    task: Task,
    input: Path,
    output: Path,
    server: Callable[[], AbstractContextManager[Server]],
    concurrency: int,
    retry_seconds: float,
) -> int:
    """Process the rows of ``input`` that ``output`` lacks and return the exit status: 1 if rows have failed.

    ``server`` is called if there are rows to send. Raises :class:`CommandError`.
    """
    ending = output.suffix.lower()
    endings = FORMATS if isinstance(task, TableTask) else FORMATS[:1]
    if ending not in endings:
        raise WrongUsage(f"{output} does not end in {' or '.join(endings)}; the ending selects the format")
    if output.resolve() == input.resolve():
        raise WrongUsage("--input and --output name the same file")
    if ending == ".parquet":
        import_arrow()
    source = open_source(input)
    task.bind(source)
    # a Parquet file cannot be continued
    part = output if ending == ".jsonl" else output.with_name(output.name + ".part.jsonl")
    if part != output and output.exists() and not part.exists():
        return _said(output, *_counted(output, task))
    lines = Output(part, task)
    try:
        rows, done = source.rows(task.read), lines.rows
        skipped = sum(1 for _ in islice(rows, done))
        if skipped < done:
            raise WrongUsage(f"the output has {done} rows, and {input} has {skipped}; name another --output, or remove the old one")
        if (first := next(rows, None)) is not None:
            with server() as running, Report(f"yardstick {task.command}", source.total) as report:
                if done:
                    report.say(f"continuing after row {done}")
                run = Run(task, Sender(running, concurrency, retry_seconds), lines, source.total, report)
                asyncio.run(run.run(chain([first], rows), _WINDOW * concurrency))
    finally:
        lines.close()
    if part != output:
        try:
            write_table(part, output, task.types)
        except OSError as error:
            raise _cannot_write(output, error) from None
        part.unlink()
    return _said(output, lines.rows, lines.failed)


def _counted(output: Path, task: Task) -> tuple[int, int]:
    """Return rows and failed rows of a complete table. Raises :class:`CommandError`."""
    source = open_source(output)
    if [*source.columns] != [*task.types]:
        raise WrongUsage(_NOT_OURS.format(output))
    errors = [bool(row.fields["error"]) for row in source.rows(["error"])]
    return len(errors), sum(errors)


def _said(output: Path, rows: int, failed: int) -> int:
    problems = f", {failed} rows failed (see the column error)" if failed else ""
    print(f"{output} is complete: {rows - failed} results{problems}", file=sys.stderr)
    return int(failed > 0)
