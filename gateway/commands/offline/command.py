"""Runs one offline command: checks the files, starts or names a server, and converts the output."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import msgspec

from gateway.commands.errors import WrongUsage
from gateway.commands.offline.convert import convert
from gateway.commands.offline.journal import Journal
from gateway.commands.offline.parquet import import_parquet
from gateway.commands.offline.progress import Report
from gateway.commands.offline.rows import Row, Source, open_source
from gateway.commands.offline.run import Limits, RowRunner
from gateway.commands.offline.sender import Server
from gateway.commands.offline.server import Running, own_server
from gateway.commands.offline.state import Finished, State, check_same, read_state, state_of, write_state
from gateway.commands.offline.tasks.base import TableTask, Task, failure_row_of


@dataclass(frozen=True)
class OfflineOptions:
    """Options that all offline commands have."""

    input: Path
    output: Path
    url: str | None
    """None: a server of the command's own."""
    api_key: str | None
    own_model: str | None
    """Model of the command's own server; None for the demo model."""
    concurrency: int
    retry_seconds: float


@dataclass(frozen=True)
class _Files:
    """Paths of the files that a run writes."""

    output: Path

    @property
    def journal(self) -> Path:
        """Where results are written first: the output itself, if its lines can be appended to."""
        return self.output if self.output.suffix.lower() == ".jsonl" else self._beside(".part.jsonl")

    @property
    def failures(self) -> Path:
        """One line for each failed row."""
        return self._beside(".failed.jsonl")

    @property
    def state(self) -> Path:
        """The options and the input of the run."""
        return self._beside(".state.json")

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(self.output.name + ending)


def execute(options: OfflineOptions, task_for: Callable[[Sequence[str]], Task], endings: Sequence[str]) -> int:
    """Run and return the exit status: 1 if rows have failed. Raises :class:`CommandError`.

    ``task_for`` makes the task from the input's columns. ``endings``: formats of the output.
    """
    _check_output(options, endings)
    source = open_source(options.input)
    task = task_for(source.columns)
    files = _Files(options.output)
    state = state_of(task.command, task.options | {"own_model": options.url is None and options.own_model}, options.input)
    found = _found_state(files, state)
    if found is not None and found.finished is not None:
        _print_finished(files, found.finished, "was finished before")
        return int(found.finished.failed > 0)
    task.check(source)
    started = time.monotonic()
    journal = Journal(files.journal, files.failures, task.row_of, failure_row_of)
    try:
        if found is None:
            write_state(files.state, state)
        _run(options, task, source, journal)
        journal.sync()
    finally:
        journal.close()
    if isinstance(task, TableTask) and files.journal != files.output:
        convert(files.journal, files.output, task.columns)
    finished = Finished(journal.rows, journal.failed)
    write_state(files.state, msgspec.structs.replace(state, finished=finished))
    if files.journal != files.output:
        files.journal.unlink(missing_ok=True)
    _print_finished(files, finished, f"is complete after {time.monotonic() - started:.1f} s")
    return int(finished.failed > 0)


def _run(options: OfflineOptions, task: Task, source: Source, journal: Journal) -> None:
    """Send the rows that ``journal`` lacks."""
    wanted = [*task.columns.read, *task.columns.keep] if isinstance(task, TableTask) else source.columns
    done = journal.rows
    rows: Iterator[Row] = dropwhile(lambda row: row.number <= done, source.rows(wanted))
    limits = Limits(options.concurrency, options.retry_seconds)
    with _server(options) as running, Report(f"yardstick {task.command}", source.total) as report:
        if done:
            report.say(f"continuing after row {done}")
        asyncio.run(RowRunner(task, journal, report, limits, running.check).run(running.server, rows))


@contextmanager
def _server(options: OfflineOptions) -> Iterator[Running]:
    if options.url is not None:
        yield Running(Server(options.url, options.api_key), lambda: None)
        return
    with own_server(options.own_model, options.api_key) as running:
        yield running


def _check_output(options: OfflineOptions, endings: Sequence[str]) -> None:
    if options.output.suffix.lower() not in endings:
        raise WrongUsage(f"{options.output} does not end in {' or '.join(endings)}; the ending selects the format")
    if options.output.suffix.lower() == ".parquet":
        import_parquet()
    if options.output.resolve() == options.input.resolve():
        raise WrongUsage("--input and --output name the same file")


def _found_state(files: _Files, state: State) -> State | None:
    """Return the state of the run to continue; None for a new run. Raises :class:`WrongUsage` if the output is not this run's."""
    found = read_state(files.state)
    if found is not None:
        check_same(found, state, files.output)
        if found.finished is not None and not files.output.exists():
            raise WrongUsage(f"{files.output} was complete and is gone; to compute it again, remove {files.state}")
        return found
    for path in (files.output, files.journal, files.failures):
        if path.exists() and path.stat().st_size > 0:
            raise WrongUsage(f"{path} exists and belongs to no run of this command; remove it, or name another --output")
    return None


def _print_finished(files: _Files, finished: Finished, how: str) -> None:
    failed = f", {finished.failed} failed (see {files.failures})" if finished.failed else ""
    print(f"{files.output} {how}: {finished.rows - finished.failed} results{failed}", file=sys.stderr)
