"""Starting the project's other programs, each as a process of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from gateway.commands.errors import CommandError

_PR_SET_PDEATHSIG = 1
_CLIENT_VARIABLES = ("YARDSTICK_API_KEY",)
"""Meant for clients; a gateway takes every other ``YARDSTICK_`` variable for a setting."""
_CLIENTS = ("loadgen", "benchmarks")
_LAST_LINES_SECONDS = 2.0


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with ``python -m module``. Raises :class:`CommandError` where that is not installed."""
    if module.startswith("engine"):
        require_engine()
    environment = dict(os.environ) if module in _CLIENTS else program_environment()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)  # noqa: S606 - no shell is wanted


def require_engine() -> None:
    """Raises :class:`CommandError` where only the gateway is installed."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError("the engine is not installed here; install it with: pip install 'yardstick-llm[engine]'")


def program_environment() -> dict[str, str]:
    """The environment that the project's programs get: without what is meant for clients."""
    return {name: value for name, value in os.environ.items() if name not in _CLIENT_VARIABLES}


class Child:
    """A program of ours, in a session of its own so that Ctrl-C reaches it only through us; on Linux it dies when we do.

    Its output is kept back until :meth:`follow` is told where it goes.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        """Start ``python -m`` with ``arguments``."""
        self.name = name
        self._process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=program_environment() | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=_death_signal(),
        )

    def follow(self, on_line: Callable[[str], None]) -> None:
        """Hand every line that the program writes to ``on_line``, from a thread."""
        self._reader = threading.Thread(target=self._read, args=[on_line], daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """False once the program has ended."""
        return self._process.poll() is None

    def read_to_the_end(self) -> None:
        """After the program has ended: wait until its last line is handed on."""
        self._reader.join(_LAST_LINES_SECONDS)

    @property
    def ending(self) -> str:
        """How it ended, once it has."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self, seconds: float) -> None:
        """Ask it to end; after ``seconds``, end it."""
        if not self.running:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_line(line.rstrip())


def _death_signal() -> Callable[[], None] | None:
    """What a new process calls first: it asks the kernel for SIGTERM when the process that started it dies, however it dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return arm
