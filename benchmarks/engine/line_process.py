"""A program that is measured beside others: it answers each line of JSON on its standard input with one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ProcessEnded(RuntimeError):
    """The program ended."""


class LineProcess:
    """A running program."""

    def __init__(self, command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own code
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, message: object) -> dict[str, Any]:
        """Send ``message``; returns the answer. Raises :class:`ProcessEnded`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line that it prints. Raises :class:`ProcessEnded`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProcessEnded(f"it ended with exit code {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()  # closes the pipes
