"""Converts the journal of a finished run to CSV or Parquet, in parts of bounded size."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.commands.errors import CommandError
from gateway.commands.offline.parquet import import_arrow, import_parquet
from gateway.commands.offline.tasks.base import Columns

_GROUP_ROWS = 10_000
_GROUP_BYTES = 16 << 20
"""A row group of the Parquet file ends at either bound."""


def convert(journal: Path, output: Path, columns: Columns) -> None:
    """Write ``output`` atomically. Raises :class:`CommandError`."""
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        (_write_csv if output.suffix.lower() == ".csv" else _write_parquet)(journal, draft, columns)
        draft.replace(output)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"cannot write {output}: {reason}; all results are in {journal}, repeat the command") from None
    finally:
        draft.unlink(missing_ok=True)


def _groups(journal: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the journal in groups."""
    group: list[dict[str, Any]] = []
    size = 0
    with journal.open("rb") as stream:
        for line in stream:
            group.append(msgspec.json.decode(line))
            size += len(line)
            if len(group) >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _write_csv(journal: Path, draft: Path, columns: Columns) -> None:
    names = ["row", *columns.keep, columns.result]
    with draft.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        for group in _groups(journal):
            writer.writerows([_cell(row[name]) for name in names] for row in group)
        stream.flush()
        os.fsync(stream.fileno())


def _cell(value: Any) -> Any:
    """Return the text of a value; lists and objects are written as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, (list, dict, bool)) else value


def _write_parquet(journal: Path, draft: Path, columns: Columns) -> None:
    arrow, parquet = import_arrow(), import_parquet()
    likelihood = arrow.struct(
        {"logprob": arrow.float64(), "mean_logprob": arrow.float64(), "tokens": arrow.int64(), "is_greedy": arrow.bool_()}
    )
    results = {
        "number": arrow.float64(),
        "numbers": arrow.list_(arrow.float64()),
        "lists": arrow.list_(arrow.list_(arrow.float64())),
        "float32s": arrow.list_(arrow.float32()),
        "likelihood": likelihood,
        "likelihoods": arrow.list_(likelihood),
    }
    kinds = _kinds(journal, columns)
    plain = {"bool": arrow.bool_(), "int": arrow.int64(), "float": arrow.float64(), "str": arrow.string()}
    kept = [(name, plain[kinds[name]]) for name in columns.keep]
    schema = arrow.schema([("row", arrow.int64()), *kept, (columns.result, results[columns.kind])])
    with parquet.ParquetWriter(draft, schema) as writer:
        for group in _groups(journal):
            rows = [{**row, **_plain_values(row, kinds)} for row in group]
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema), row_group_size=_GROUP_ROWS)


def _kinds(journal: Path, columns: Columns) -> dict[str, str]:
    """Return the type of each kept column, in which all its values can be written."""
    found: dict[str, set[str]] = {name: set() for name in columns.keep}
    if found:
        for group in _groups(journal):
            for row in group:
                for name, kinds in found.items():
                    if row[name] is not None:
                        kinds.add(_kind(row[name]))
    return {name: _joined(kinds) for name, kinds in found.items()}


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return "str"
    return type(value).__name__


def _joined(kinds: set[str]) -> str:
    if kinds in ({"bool"}, {"int"}, {"float"}):
        return next(iter(kinds))
    return "float" if kinds == {"int", "float"} else "str"


def _plain_values(row: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    return {name: _plain(row[name], kind) for name, kind in kinds.items()}


def _plain(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "str":
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return float(value) if kind == "float" else value
