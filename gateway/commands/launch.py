"""Starts the project's other programs as separate processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from gateway.commands.errors import CommandError
from gateway.process.parent import ending_with

_CLIENT_VARIABLES = ("YARDSTICK_API_KEY", "YARDSTICK_LOAD_KEY")
"""Variables for clients. A gateway treats every other ``YARDSTICK_`` variable as a setting."""
_CLIENTS = ("loadgen", "benchmarks")
_LAST_LINES_SECONDS = 2.0


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with ``python -m module``. Raises :class:`CommandError` if the engine is needed and not installed."""
    if module.startswith("engine"):
        require_engine()
    environment = dict(os.environ) if module in _CLIENTS else program_environment()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)  # noqa: S606 - no shell is wanted


def require_engine() -> None:
    """Raise :class:`CommandError` if only the gateway is installed."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError("the engine is not installed here; install it with: pip install 'yardstick-llm[engine]'")


def program_environment() -> dict[str, str]:
    """Return the environment for the project's programs, without the variables for clients."""
    return {name: value for name, value in os.environ.items() if name not in _CLIENT_VARIABLES}


class Child:
    """A child program in its own session, so that Ctrl-C reaches only this process. On Linux it ends when this process ends.

    Its output is not read until :meth:`follow` is called.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start ``python -m`` with ``arguments``. ``name``: in messages to the user. ``environment``: further variables."""
        self.name = name
        self.program = arguments[0]
        self._process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=program_environment() | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
            start_new_session=True,
            preexec_fn=ending_with(os.getpid(), signal.SIGTERM, 1),
        )

    def follow(self, on_line: Callable[[str], None]) -> None:
        """Pass every line that the program writes to ``on_line``, from a thread."""
        self._reader = threading.Thread(target=self._read, args=[on_line], daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the program runs."""
        return self._process.poll() is None

    def read_to_the_end(self) -> None:
        """Wait until the last line of an ended program has been passed on."""
        self._reader.join(_LAST_LINES_SECONDS)

    @property
    def refused(self) -> bool:
        """Whether the program has ended because an option is wrong."""
        return self._process.poll() == 2

    @property
    def ending(self) -> str:
        """Description of the exit status of an ended program."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def terminate(self) -> None:
        """Ask the program to end."""
        if self.running:
            self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Wait until the program has ended; kill it after ``seconds``."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the program."""
        self._process.kill()
        self._process.wait()

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                on_line(line.rstrip())


def stop(children: Sequence[Child], seconds: float) -> None:
    """Ask all ``children`` to end, and kill those that have not ended after ``seconds``."""
    for child in children:
        child.terminate()
    end = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, end - time.monotonic()))
