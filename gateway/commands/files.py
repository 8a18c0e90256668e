"""Files of the commands: rows of JSON Lines, CSV and Parquet, tables of results, and files that are replaced as a whole."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from yardstick_llm.gateway.commands import CommandError, WrongUsage

FORMATS = (".jsonl", ".csv", ".parquet")
_BOM = b"\xef\xbb\xbf"
_GROUP_ROWS, _GROUP_BYTES = 10_000, 16 << 20
"""A row group of a written Parquet file ends at either bound."""
_BATCH_ROWS = 256
"""Rows of a read Parquet file that are Python objects at a time."""


class UnreadableInput(CommandError):
    """The rest of an input cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an input."""

    number: int
    """Counted from 1; empty lines are not rows."""
    fields: dict[str, Any]
    """Values by column; empty if the row cannot be read."""
    size: int
    """Length in bytes, approximately."""
    position: int
    """Bytes of the file up to the end of this row; rows if it is a Parquet file."""
    problem: str | None = None
    """Why the row cannot be read."""


@dataclass(frozen=True)
class Source:
    """An input file. The ending of its name is its format."""

    path: Path
    columns: Sequence[str]
    """Names of the columns; in JSON Lines, those of the first row."""
    total: int
    """:attr:`Row.position` of the last row."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yield all rows with at least the values of ``columns``. Raises :class:`UnreadableInput`."""
        if self.path.suffix.lower() == ".parquet":
            return _parquet_rows(self.path, [name for name in self.columns if name in columns])
        return _json_rows(self.path) if self.path.suffix.lower() == ".jsonl" else _csv_rows(self.path)


def open_source(path: Path) -> Source:
    """Open an input. Raises :class:`WrongUsage`."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise WrongUsage(f"{path} does not end in .jsonl, .csv or .parquet; the ending selects the format")
    try:
        if ending == ".parquet":
            with import_arrow("parquet").ParquetFile(path) as file:
                return Source(path, list(file.schema_arrow.names), file.metadata.num_rows)
        if ending == ".csv":
            return Source(path, next(_csv_records(path))[2], path.stat().st_size)
        first = next(_json_rows(path), None)
    except OSError as error:
        raise WrongUsage(f"cannot read {path}: {reason_of(error)}") from None
    except ValueError as error:  # pyarrow's errors derive from it
        raise WrongUsage(f"cannot read {path}: {' '.join(str(error).split())}") from None
    except StopIteration:
        raise WrongUsage(f"{path} has no header; its first line names the columns") from None
    if first is None or first.problem is not None:
        raise WrongUsage(f"{path} has no rows" if first is None else f"{path}, {first.problem}")
    return Source(path, [*first.fields], path.stat().st_size)


def _json_rows(path: Path) -> Iterator[Row]:
    number = 0
    with path.open("rb") as stream:
        for line, text in enumerate(stream, start=1):
            content = text.removeprefix(_BOM) if line == 1 else text
            if not content.strip():
                continue
            number += 1
            try:
                yield Row(number, msgspec.json.decode(content, type=dict[str, Any]), len(text), stream.tell())
            except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
                yield Row(number, {}, len(text), stream.tell(), f"line {line}: not a JSON object ({error})")


def _csv_records(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yield line, position and values of each record that is not empty. Raises :class:`UnreadableInput`."""
    csv.field_size_limit(sys.maxsize)
    with path.open("rb") as stream:
        stream.seek(len(_BOM) if stream.read(len(_BOM)) == _BOM else 0)
        reader = csv.reader((line.decode() for line in stream), strict=True)
        while True:
            try:
                record = next(reader, None)
            except csv.Error as error:
                raise UnreadableInput(f"{path}, line {reader.line_num}: not CSV ({error}); a quote may be missing") from None
            except UnicodeDecodeError:
                raise UnreadableInput(f"{path}, line {reader.line_num + 1}: not UTF-8 text; convert the file first") from None
            if record is None:
                return
            if record:
                yield reader.line_num, stream.tell(), record


def _csv_rows(path: Path) -> Iterator[Row]:
    records = _csv_records(path)
    _, _, header = next(records)
    for number, (line, position, record) in enumerate(records, start=1):
        size = sum(map(len, record))
        if len(record) == len(header):
            yield Row(number, dict(zip(header, record, strict=True)), size, position)
        else:
            problem = f"line {line}: {len(record)} values, but the header has {len(header)}"
            yield Row(number, {}, size, position, problem)


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    number = 0
    try:
        with import_arrow("parquet").ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                size = batch.nbytes // batch.num_rows
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, fields, size, number)
    except (ValueError, OSError) as error:
        raise UnreadableInput(f"{path}, row {number + 1}: {' '.join(str(error).split())}") from None


def import_arrow(module: str = "") -> Any:
    """Return ``pyarrow`` or a module of it. Raises :class:`WrongUsage` where it is missing."""
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError:
        raise WrongUsage("Parquet files need pyarrow; install it with: pip install 'yardstick-llm[parquet]'") from None


def write_table(lines: Path, output: Path, types: Mapping[str, str | None]) -> None:
    """Write the JSON Lines of ``lines`` as CSV or Parquet, atomically, in parts of bounded size.

    ``types``: columns of the output and their Parquet types, as :func:`_arrow_type` takes them; None for the type that all values
    have, or text if they have several. Raises OSError.
    """
    with _draft(output) as draft:
        (_write_csv if output.suffix.lower() == ".csv" else _write_parquet)(lines, draft, types)


def _groups(lines: Path) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    size = 0
    with lines.open("rb") as stream:
        for line in stream:
            group.append(msgspec.json.decode(line))
            size += len(line)
            if len(group) == _GROUP_ROWS or size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _write_csv(lines: Path, draft: Path, types: Mapping[str, str | None]) -> None:
    with draft.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(types)
        for group in _groups(lines):
            writer.writerows([_text(row[name], (list, dict, bool)) for name in types] for row in group)


def _write_parquet(lines: Path, draft: Path, types: Mapping[str, str | None]) -> None:
    arrow, parquet = import_arrow(), import_arrow("parquet")
    found: dict[str, set[str]] = {name: set() for name, chosen in types.items() if chosen is None}
    for group in _groups(lines) if found else ():
        for name, kinds in found.items():
            kinds |= {_kind(row[name]) for row in group if row[name] is not None}
    chosen = {name: given or _common_kind(found[name]) for name, given in types.items()}
    schema = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in chosen.items()])
    texts = [name for name in found if chosen[name] == "str"]
    with parquet.ParquetWriter(draft, schema) as writer:
        for group in _groups(lines):
            rows = [row | {name: _text(row[name], (list, dict, bool, int, float)) for name in texts} for row in group]
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema), row_group_size=_GROUP_ROWS)


def _arrow_type(arrow: Any, kind: str) -> Any:
    """Return the type of a name such as ``int``, ``float32``, ``likelihood``, or ``[float]`` for a list."""
    if kind.startswith("["):
        return arrow.list_(_arrow_type(arrow, kind[1:-1]))
    if kind == "likelihood":
        numbers = {"logprob": arrow.float64(), "mean_logprob": arrow.float64(), "tokens": arrow.int64()}
        return arrow.struct(numbers | {"is_greedy": arrow.bool_()})
    plain = {"bool": arrow.bool_, "int": arrow.int64, "float": arrow.float64, "float32": arrow.float32, "str": arrow.string}
    return plain[kind]()


def _kind(value: Any) -> str:
    wide = type(value) is int and not -(2**63) <= value < 2**63
    return "str" if wide else type(value).__name__


def _common_kind(kinds: set[str]) -> str:
    if kinds == {"int", "float"}:
        return "float"
    return next(iter(kinds)) if kinds in ({"bool"}, {"int"}, {"float"}) else "str"


def _text(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return a value of ``kinds`` as JSON text, and others unchanged."""
    return msgspec.json.encode(value).decode() if isinstance(value, kinds) else value


def replace_file(file: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write ``file`` atomically: it keeps what it had if there is an error, and its owner and permissions in any case.

    ``mode``: permissions of a new file, before the umask. Raises :class:`CommandError`.
    """
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):  # such as /dev/stdout
            file.write_bytes(content)
            return
        before = file.stat() if file.exists() else None
        with _draft(file, mode if before is None else 0o600) as draft, draft.open("r+b") as stream:
            stream.write(content)
            if before is not None:
                with suppress(PermissionError):  # only root may give a file away
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), before.st_mode & 0o7777)
    except OSError as error:
        raise CommandError(f"cannot write {file}: {reason_of(error)}") from None


@contextmanager
def _draft(file: Path, mode: int = 0o666) -> Iterator[Path]:
    """A new file that takes the place of ``file`` at the end, once the disk has stored it."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # left by a killed process, or a link that somebody else made: neither is written to
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            yield draft
            os.fsync(descriptor)  # before the rename, or a crash of the machine may leave an empty file
        finally:
            os.close(descriptor)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def reason_of(error: OSError) -> str:
    """Return the system's reason, as the end of a message."""
    return (error.strerror or str(error)).lower()
