"""The project's other programs as processes: this process becomes one, or watches engines and a gateway and ends them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import httpx
from rich.console import Console

from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.errors import UnusableModel
from yardstick_llm.gateway.pool.discovery import http_url
from yardstick_llm.gateway.process.signals import ending_with
from yardstick_llm.gateway.settings import Settings

_CHECKOUT = Path(__file__).resolve().parents[2]
_CLIENT_VARIABLES = ("YARDSTICK_API_KEY", "YARDSTICK_LOAD_KEY")
"""Variables for clients. A gateway treats every other ``YARDSTICK_`` variable as a setting."""
_CLIENTS = ("loadgen", "benchmarks")
_POLL_SECONDS = 0.1
_LAST_LINES_SECONDS = 2.0
_ENGINE_SECONDS = 10.0
"""Time that the engines have to end after the gateway, and with it every request, has ended."""
_SPARE_SECONDS = 5.0
"""The gateway ends within its grace period; it is killed if it takes this much longer."""
_WARNING = " WARNING "
"""Level of a line of the log."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104 - local addresses of servers that listen on all


def become(module: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process with ``python -m module``. Raises :class:`CommandError` if the engine is needed and not installed."""
    if module.startswith("engine"):
        require_engine()
    environment = dict(os.environ) if module in _CLIENTS else program_environment()
    os.execve(  # noqa: S606 - no shell is wanted
        sys.executable,
        [sys.executable, "-m", module if module == "benchmarks" else f"yardstick_llm.{module}", *arguments],
        environment | dict(variables or {}),
    )


def become_benchmarks(arguments: Sequence[str], checkout: Path = _CHECKOUT) -> NoReturn:
    """Replace this process with ``python -m benchmarks``. Raises :class:`CommandError` if the package is not in a checkout."""
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise CommandError(
            "the benchmarks are not in the installed package; run `python -m benchmarks` in a checkout of the source"
        )
    require_engine()
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    # A folder named benchmarks in the current directory must not take precedence over the checkout's.
    become("benchmarks", arguments, {"PYTHONSAFEPATH": "1", "PYTHONPATH": path})


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

    def __init__(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start ``python -m`` with ``arguments``. ``name``: in messages to the user. ``variables``: besides the environment's."""
        self.name = name
        self.program = arguments[0]
        self.process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", f"yardstick_llm.{self.program}", *arguments[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=program_environment() | {"PYTHONUNBUFFERED": "1"} | dict(variables or {}),
            start_new_session=True,
            preexec_fn=ending_with(os.getpid(), signal.SIGTERM, 1),
        )

    def follow(self, on_line: Callable[[str], None]) -> None:
        """Pass every line that the program writes to ``on_line``, from a thread."""
        self._reader = threading.Thread(target=self._read, args=[on_line], daemon=True)
        self._reader.start()

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                on_line(line.rstrip())

    def read_to_the_end(self) -> None:
        """Wait until the last line of an ended program has been passed on."""
        self._reader.join(_LAST_LINES_SECONDS)


def stop(children: Sequence[Child], seconds: float) -> None:
    """Ask all ``children`` to end, and kill those that have not ended after ``seconds``."""
    for child in children:
        child.process.terminate()
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


class Stop(KeyboardInterrupt):
    """A signal asked this process to end. An event loop lets no other exception out of its callbacks."""

    def __init__(self, number: int) -> None:
        """``number``: the signal."""
        super().__init__()
        self.number = number


class Supervisor:
    """Watches engines and the gateway in front of them."""

    def __init__(self, engines: Sequence[Child], gateway: Child, settings: Settings) -> None:
        self._settings = settings
        self.url = http_url(_WILDCARDS.get(settings.host, settings.host), settings.port)
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
            while not all(_is_ready(client, url) for url in (self.url, *self._settings.engines)):
                self.check_running()
                status.update(f"{time.monotonic() - started:.0f} s  {self._progress[:100]}")
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
        """Raise :class:`CommandError` if one of the programs has ended; :class:`WrongUsage` if it refused an option."""
        for child in self._children:
            if (code := child.process.poll()) is None:
                continue
            child.read_to_the_end()
            name = f"the {child.name}" if child.name == child.program else child.name
            line, prefix = self._latest[child.name], f"{child.program}: "
            ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            why = f"{ending}; its last line of output: {line}" if line else ending
            why = line.removeprefix(prefix) if line.startswith(prefix) else why
            raise (WrongUsage if code == WrongUsage.status else CommandError)(f"{name} has ended: {why}")

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
                child.process.kill()
                child.process.wait()


@contextmanager
def signals_raise_stop() -> Iterator[None]:
    """Convert the signals that ask a program to end into :class:`Stop`."""

    def on_signal(number: int, _: FrameType | None) -> None:
        raise Stop(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_ready(client: httpx.Client, url: str) -> bool:
    """Return whether a gateway or an engine is ready. Raises :class:`CommandError` if waiting cannot help."""
    try:
        response = client.get(f"{url}/readyz")
    except httpx.TransportError:
        return False
    if UnusableModel.code in response.text and not response.is_success:
        raise CommandError(response.json()["error"]["message"])
    return response.is_success
