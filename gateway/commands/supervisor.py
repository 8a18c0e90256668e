"""Watches engines and a gateway that run as child processes: waits until they are ready, reports an end, and stops them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import httpx
from rich.console import Console
from rich.status import Status

from gateway.commands.errors import CommandError, WrongUsage
from gateway.commands.launch import Child, stop
from gateway.errors import UnusableModel
from gateway.settings import Settings

_POLL_SECONDS = 0.1
_ENGINE_SECONDS = 10.0
"""Time that the engines have to end after the gateway, and with it every request, has ended."""
_SPARE_SECONDS = 5.0
"""The gateway ends within its grace period; it is killed if it takes this much longer."""
_WARNING = " WARNING "
"""Level of a line of the log."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104 - local addresses of servers that listen on all


class Stop(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        """``number``: the signal."""
        super().__init__()
        self.number = number


class Supervisor:
    """Watches the engines and the gateway in front of them."""

    def __init__(self, engines: Sequence[Child], gateway: Child, settings: Settings) -> None:
        self._settings = settings
        self.url = url_of(_WILDCARDS.get(settings.host, settings.host), settings.port)
        self._children = (*engines, gateway)
        self.console = Console(stderr=True, highlight=False, markup=False)
        self._latest = {child.name: "" for child in self._children}
        self._progress = ""
        """The latest line of any engine."""
        self._talkative = False
        self._warnings: list[str] = []
        """Warnings of the engines while they load. The gateway's only say that the engines are not ready."""
        for child in self._children:
            child.follow(partial(self._on_line, child))

    def wait_until_ready(self, what: str, *, talkative: bool = True) -> None:
        """Return when gateway and engines are ready. ``what``: the model's name, to print. ``talkative``: print the programs'
        output from then on.

        Raises :class:`CommandError` if one of them ends.
        """
        started = time.monotonic()
        self.console.print(f"Loading {what} …", soft_wrap=True)
        with self.console.status("") as status, httpx.Client(trust_env=False) as client:
            while not (_gateway_is_ready(client, self.url) and all(_is_ready(client, url) for url in self._settings.engines)):
                self.check_running()
                self._show_progress(status, time.monotonic() - started)
                time.sleep(_POLL_SECONDS)
        self._talkative = talkative
        for warning in self._warnings if talkative else ():
            _say(warning)
        self.console.print(f"Ready after {time.monotonic() - started:.1f} s: {self.url}/v1")

    def watch(self) -> None:
        """Never return. Raises :class:`CommandError` when a process ends; a signal raises :class:`Stop`."""
        while True:
            self.check_running()
            time.sleep(_POLL_SECONDS)

    def say_stopping(self) -> None:
        """Print that the programs stop, and suppress their further output."""
        self._talkative = False
        seconds = self._settings.grace_seconds
        _say(f"Stopping; open requests have {seconds:g} s to end. Press Ctrl-C again to end at once.")

    def check_running(self) -> None:
        """Raise :class:`CommandError` if one of the programs has ended."""
        for child in self._children:
            if not child.running:
                child.read_to_the_end()
                name = f"the {child.name}" if child.name == child.program else child.name
                raise (WrongUsage if child.refused else CommandError)(f"{name} has ended: {self._why(child)}")

    def _why(self, child: Child) -> str:
        line, prefix = self._latest[child.name], f"{child.program}: "
        if line.startswith(prefix):
            return line.removeprefix(prefix)
        return f"{child.ending}; its last line of output: {line}" if line else child.ending

    def _show_progress(self, status: Status, seconds: float) -> None:
        status.update(f"{seconds:.0f} s  {self._progress[:100]}")

    def _on_line(self, child: Child, line: str) -> None:
        """Store a line of a child, in its reader thread. A line with the program's name is its reason to end, so it is kept."""
        prefix = f"{child.program}: "
        if not line:
            return
        if line.startswith(prefix) or not self._latest[child.name].startswith(prefix):
            self._latest[child.name] = line
        if child.program == "engine":
            self._progress = line if child.name == child.program else f"{child.name}: {line}"
        said = f"{child.name}: {line.removeprefix(prefix)}"
        if self._talkative:
            _say(said)
        elif child.program == "engine" and _WARNING in line:
            self._warnings.append(said)


def _say(line: str) -> None:
    """Write a line to standard error, unless its disk is full: the programs' output must be read on, or they block."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def supervised(engines: Sequence[Child], gateway: Child, settings: Settings) -> Iterator[Supervisor]:
    """Follow all programs. In every case end all, the gateway first so that it can finish its responses."""
    supervisor = Supervisor(engines, gateway, settings)
    try:
        yield supervisor
    except Stop:
        supervisor.say_stopping()
        raise
    finally:
        try:
            stop([gateway], settings.grace_seconds + _SPARE_SECONDS)
            stop(engines, _ENGINE_SECONDS)
        finally:  # reached early if a second signal interrupts the wait
            for child in (gateway, *engines):
                child.kill()


@contextmanager
def told_to_stop() -> Iterator[None]:
    """Convert the signals that ask a program to end into :class:`Stop`."""

    def on_signal(number: int, _: FrameType | None) -> None:
        raise Stop(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_ready(client: httpx.Client, engine: str) -> bool:
    """Return whether an engine is ready."""
    try:
        return client.get(f"{engine}/readyz").is_success
    except httpx.TransportError:
        return False


def _gateway_is_ready(client: httpx.Client, gateway: str) -> bool:
    """Return whether the gateway knows a ready engine. Raises :class:`CommandError` if waiting cannot help."""
    try:
        response = client.get(f"{gateway}/readyz")
    except httpx.TransportError:
        return False
    if not response.is_success and (error := response.json()["error"])["code"] == UnusableModel.code:
        raise CommandError(error["message"])
    return response.is_success


def url_of(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
