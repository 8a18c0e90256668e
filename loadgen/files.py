"""Writes the files of a run: ``records.jsonl``, ``report.txt`` and ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadgen import records
from loadgen.errors import LoadError, reason_of
from loadgen.records import Run
from loadgen.report import as_json, as_text
from loadgen.statistics import Results


def write_reports(results: Results, folder: Path) -> None:
    """Write all files except the records. Raises :class:`LoadError`."""
    with writing(folder):
        (folder / "report.txt").write_text(as_text(results), encoding="utf-8")
        (folder / "summary.json").write_text(as_json(results) + "\n", encoding="utf-8")


def write_records(runs: Sequence[Run], folder: Path) -> None:
    """Write the records of all workers, one after another. Raises :class:`LoadError`."""
    with writing(folder), (folder / records.RECORDS).open("wb") as stream:
        for run in runs:
            stream.writelines(records.lines(run))


def check_written(run: Run, folder: Path) -> None:
    """Raise :class:`LoadError` if the records of the run could not be written to ``folder`` during the run."""
    if run.unwritten:
        left = f"{folder / records.RECORDS} has the first ones"
        raise LoadError(f"cannot write all records to {folder}: {run.unwritten}; {left}; choose another --out")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create ``folder``, and convert errors of writing to :class:`LoadError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise LoadError(f"cannot write to {folder}: {reason_of(error)}; choose another --out") from None
