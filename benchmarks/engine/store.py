"""Results of a benchmark that may end at any moment: each is on disk once it is measured, and a later run measures the rest."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "results.jsonl"


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
        self.resumed = resume
        self.results: dict[str, Any] = {}
        self.left_out: list[str] = []
        """Keys for which there was no time."""
        self._clock = clock
        self._end = clock() + limit
        self._path = None if folder is None else folder / FILE
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open(self._path, resume=resume)

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
            line = json.dumps({"key": key, "result": result}) + "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        return result

    def _open(self, path: Path, *, resume: bool) -> None:
        """Read the results of an earlier run, without a last line that it did not complete."""
        content = path.read_bytes() if resume and path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            entry = json.loads(line)
            self.results[entry["key"]] = entry["result"]
        replace(path, whole)


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or as it was before."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
