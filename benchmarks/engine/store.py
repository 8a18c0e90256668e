"""Results of a benchmark that may end at any moment: each is on disk once it is measured, and a later run measures the rest."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
RECORDS = "records.jsonl"
"""Raw measurements; :class:`benchmarks.engine.records.Records` writes them."""


class Store:
    """Measured results by key. Without a folder they are kept in memory only."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        resume: bool = False,
        limit: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``resume``: take the results that are in the folder; otherwise they are removed. ``limit``: seconds from now."""
        self.folder = folder
        self.stored: Callable[[], None] = lambda: None
        """Called after a result is stored."""
        self.results: dict[str, Any] = {}
        self.left_out: list[str] = []
        """Keys for which there was no time."""
        self._clock = clock
        self._end = clock() + limit
        self._path = None if folder is None else folder / FILE
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            whole_lines(folder / RECORDS, keep=resume)
            for line in whole_lines(folder / FILE, keep=resume):
                entry = json.loads(line)
                self.results[entry["key"]] = entry["result"]

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - self._clock()

    def measure(self, key: str, seconds: float, work: Callable[[], Any]) -> Any:
        """The stored result of ``key``, or else that of ``work``, which is stored. None, and no call, if less than ``seconds`` are
        left. A result is of JSON's types and not None."""
        if key in self.results:
            return self.results[key]
        if self.left < seconds:
            self.left_out.append(key)
            return None
        result = work()
        assert result is not None, key
        self.results[key] = result
        if self._path is not None:
            append(self._path, [{"key": key, "result": result}])
        self.stored()
        return result


def whole_lines(path: Path, *, keep: bool) -> list[bytes]:
    """The lines of a file, which loses a last one that its writer did not complete. Without ``keep`` it loses all of them."""
    content = path.read_bytes() if keep and path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    replace(path, whole)
    return whole.splitlines()


def append(path: Path, rows: Sequence[Any]) -> None:
    """Add rows to a file of JSON lines; they are on disk then."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or as it was before."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
