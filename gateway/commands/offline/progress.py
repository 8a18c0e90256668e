"""Progress on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Time between two lines where standard error is no terminal."""


class Report:
    """Shows how far a run is."""

    def __init__(self, title: str, total: int) -> None:
        """``total``: the end of the position that :meth:`update` gets."""
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._title = title
        self._total = max(1, total)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(title, total=self._total, counts="")
        self._started = self._last_line = time.monotonic()
        self._first_row: int | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, position: int, rows: int, failed: int) -> None:
        """Show the state after ``rows`` rows, of which ``failed`` failed."""
        if self._first_row is None:
            self._first_row = rows
        counts = f"{rows} rows, {failed} failed"
        self._bar.update(self._task, completed=position, counts=counts)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            rate = (rows - self._first_row) / (now - self._started)
            self.say(f"{self._title}: {100 * position / self._total:.0f} %, {counts}, {rate:.0f} rows a second")

    def progress(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` items are done."""
        self._bar.update(self._task, completed=done, total=max(1, total), counts=f"{done} of {total}")
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.say(f"{self._title}: {done} of {total}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, soft_wrap=True)
