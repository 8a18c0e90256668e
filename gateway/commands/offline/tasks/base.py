"""The interface between a command and the shared runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from gateway.commands.errors import WrongUsage
from gateway.commands.offline.rows import Row, Source

Kind = Literal["number", "numbers", "lists", "float32s", "likelihood", "likelihoods"]
"""Type of a result column: a number, a list of numbers, a list of such lists, a list that float32 can hold, an item's likelihood,
or a list of likelihoods."""


class RowError(Exception):
    """One row cannot be sent, or has no valid answer. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Item:
    """A row that is ready to be sent."""

    row: Row
    content: Any
    """The part of the request body that comes from the row."""
    group: Any = None
    """Only rows of equal groups may share a request."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request."""

    path: str
    body: bytes
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer."""

    status: int
    request_id: str | None
    content: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer to one row."""

    message: str
    status: int | None = None
    code: str | None = None
    param: str | None = None
    """Field of the request that the server names."""
    request_id: str | None = None
    content: bytes = b""
    """The body of the answer."""


class Task(ABC):
    """Defines the rows that a command reads, the requests that it sends, and the results that it writes."""

    command: ClassVar[str]
    rows_a_request: int = 1

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All options that change the results."""

    def check(self, source: Source) -> None:  # noqa: B027 - most tasks have nothing to check
        """Check the whole input before a request is sent. Raises :class:`WrongUsage`."""

    @abstractmethod
    def item(self, row: Row) -> Item:
        """Check a row. Raises :class:`RowError`."""

    @abstractmethod
    def call(self, items: Sequence[Item]) -> Call:
        """Return the request for ``items``, which have equal groups."""

    @abstractmethod
    def lines(self, items: Sequence[Item], answer: Answer) -> list[bytes]:
        """Return the output line of each item. Raises :class:`RowError` or :class:`msgspec.DecodeError`."""

    @abstractmethod
    def failure(self, row: Row, refusal: Refusal) -> bytes:
        """Return the line of the file of failures."""

    def row_of(self, line: bytes) -> int:
        """Return the row number of an output line. Raises ValueError."""
        return failure_row_of(line)

    def stops(self, refusal: Refusal) -> bool:
        """Return whether every other row would be refused too."""
        return refusal.status in (401, 403)


@dataclass(frozen=True)
class Columns:
    """Columns of the input and of the output."""

    read: tuple[str, ...]
    """Columns of the input that the task sends."""
    keep: tuple[str, ...]
    """Columns of the input that the output repeats."""
    result: str
    """Name of the column of results."""
    kind: Kind

    def check(self, source: Sequence[str]) -> None:
        """Check that the kept columns exist. Raises :class:`WrongUsage`."""
        for name in self.keep:
            if name not in source:
                raise WrongUsage(f"there is no column {name!r} to keep; the input has {listed(source)}")
            if name in ("row", self.result):
                raise WrongUsage(f"the column {name!r} cannot be kept, because the output has its own column of this name")


@dataclass
class TableTask(Task):
    """A task whose output is a table: the row's number, kept columns, and one column of results."""

    constant: dict[str, Any]
    """Fields of every request body."""
    columns: Columns
    rows_a_request: int = 32
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other options that change the results."""

    @property
    def options(self) -> dict[str, Any]:
        return {"constant": self.constant, "columns": asdict(self.columns), "settings": dict(self.settings)}

    def lines(self, items: Sequence[Item], answer: Answer) -> list[bytes]:
        results = self.results(items, answer.content)
        if len(results) != len(items):
            raise RowError(f"the answer has {len(results)} results for {len(items)} rows")
        return [self._line(item.row, result) for item, result in zip(items, results, strict=True)]

    @abstractmethod
    def results(self, items: Sequence[Item], content: bytes) -> Sequence[Any]:
        """Return the result of each item. Raises :class:`RowError` or :class:`msgspec.DecodeError`."""

    def failure(self, row: Row, refusal: Refusal) -> bytes:
        detail = {"line": row.line, "status": refusal.status, "code": refusal.code, "error": refusal.message}
        return encoded({"row": row.number, **self._kept(row), **detail})

    def stops(self, refusal: Refusal) -> bool:
        name = (refusal.param or "").partition("[")[0]
        return super().stops(refusal) or refusal.status == 404 or name == "model" or name in self.constant

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """Return a request body."""
        return msgspec.json.encode({**self.constant, **fields})

    def _line(self, row: Row, result: Any) -> bytes:
        return encoded({"row": row.number, **self._kept(row), self.columns.result: result})

    def _kept(self, row: Row) -> dict[str, Any]:
        return {name: row.fields.get(name) for name in self.columns.keep}


class _Numbered(msgspec.Struct):
    row: int


_numbered = msgspec.json.Decoder(_Numbered)


def failure_row_of(line: bytes) -> int:
    """Return the row number of a line with a field ``row``. Raises ValueError."""
    return _numbered.decode(line).row


def encoded(fields: Mapping[str, Any]) -> bytes:
    """Return a line of JSON."""
    return msgspec.json.encode(fields, enc_hook=str) + b"\n"


def text_of(row: Row, column: str) -> str:
    """Return the text of a column. Raises :class:`RowError`."""
    value = row.fields.get(column)
    if not isinstance(value, str):
        raise RowError(f"no column {column!r}" if value is None else f"column {column!r} is not a text")
    return value


def texts_of(row: Row, column: str) -> list[str]:
    """Return the list of texts of a column, which in CSV is written as JSON. Raises :class:`RowError`."""
    value = row.fields.get(column)
    if value is None:
        raise RowError(f"no column {column!r}")
    try:
        texts = msgspec.json.decode(value, type=list[str]) if isinstance(value, str) else msgspec.convert(value, list[str])
    except msgspec.DecodeError:
        raise RowError(f"column {column!r} is not a list of texts") from None
    if not texts:
        raise RowError(f"column {column!r} is empty")
    return texts


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given."""
    return {name: value for name, value in fields.items() if value is not None}


def choose_column(source: Sequence[str], several: str, one: str) -> str:
    """Return which of two columns the input has. Raises :class:`WrongUsage`."""
    for name in (several, one):
        if name in source:
            return name
    raise WrongUsage(f"the input has no column {several!r} or {one!r}; it has {listed(source)}")


def need_column(source: Sequence[str], name: str, option: str) -> None:
    """Check that the input has a column. Raises :class:`WrongUsage`."""
    if name not in source:
        raise WrongUsage(f"the input has no column {name!r}; it has {listed(source)}; name another with {option}")


def listed(names: Sequence[str]) -> str:
    """Return names for an error message, bounded."""
    shown = ", ".join(repr(name) for name in names[:20])
    return (shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more") or "none"
