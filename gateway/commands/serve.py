"""``yardstick serve``: runs an engine and a gateway on this machine until one of them ends or a signal arrives."""

from __future__ import annotations

import errno
import importlib.util
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
from rich.console import Console
from rich.status import Status

from gateway.commands.errors import CommandError
from gateway.commands.example import show_calls, show_example
from gateway.commands.launch import Child, program_environment, require_engine
from gateway.errors import UnusableModel
from gateway.settings import PREFIX, Settings, SettingsError, is_loopback, load_settings

_DEMO_NAME = "yardstick-demo"
_ENGINE_OPTIONS = ("lenvm_gamma", "dtype", "quantize", "max_total_tokens")
"""Options that are passed to the engine unchanged; :mod:`engine.settings` defines them."""
_OF_THE_MODEL = {"presets": "preset", "tool_parsers": "tool_parser", "reasoning_parsers": "reasoning_parser"}
"""The gateway's settings with an entry ``MODEL=NAME`` for each model, and the options with the name for the one model."""
_POLL_SECONDS = 0.1
_ENGINE_SECONDS = 10.0
"""Time that the engine has to end after the gateway, and with it every request, has ended."""
_SPARE_SECONDS = 5.0
"""The gateway ends within its grace period; it is killed if it takes this much longer."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104 - local addresses of servers that listen on all addresses


@dataclass(frozen=True)
class ServeOptions:
    """Options of the command line; None means not given."""

    model: str | None
    lenvm_model: str | None
    lenvm_gamma: float | None
    host: str | None
    port: int | None
    dtype: str | None
    quantize: str | None
    max_total_tokens: int | None
    api_keys_file: Path | None
    preset: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return _DEMO_NAME if self.model is None else Path(self.model).resolve().name


class _Models(NamedTuple):
    """Model directories or Hugging Face hub ids."""

    model: str
    lenvm: str | None


class _Stop(Exception):
    """A signal asked this process to end."""


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises :class:`CommandError` if it cannot start or a process ends by itself."""
    require_engine()
    settings = gateway_settings(options, program_environment())
    _check_port(settings)
    try:
        with _told_to_stop(), children(options, settings, models_of(options)) as supervisor:
            supervisor.wait_until_ready(options)
            supervisor.say_ready(options)
            supervisor.watch()
    except _Stop:
        return


def gateway_settings(options: ServeOptions, environment: Mapping[str, str]) -> Settings:
    """Return the gateway's settings: ``environment``, overridden by options and by the engine that is started here.

    Raises :class:`CommandError`.
    """
    if f"{PREFIX}ENGINES" in environment:
        raise CommandError(
            f"{PREFIX}ENGINES is set, but `yardstick serve` starts the engine itself; unset it, or run `yardstick gateway` to"
            " serve other engines"
        )
    flags: dict[str, Any] = {"host": options.host, "port": options.port, "api_keys_file": options.api_keys_file}
    for setting, chosen in _OF_THE_MODEL.items():
        flags[setting] = None if getattr(options, chosen) is None else [f"{options.name}={getattr(options, chosen)}"]
    host = options.host or environment.get(f"{PREFIX}HOST", "127.0.0.1")
    with_keys = options.api_keys_file is not None or f"{PREFIX}API_KEYS_FILE" in environment
    if not with_keys and not is_loopback(host):
        raise CommandError(
            f"{host} can be reached from other machines, so API keys are needed; make one with "
            "`yardstick keys new NAME --file keys.json` and add --api-keys-file keys.json"
        )
    try:
        settings = load_settings(environment, flags | {"engines": [_url("127.0.0.1", _free_port())]})
    except SettingsError as error:
        raise CommandError(str(error)) from None
    return settings if settings.port else msgspec.structs.replace(settings, port=_free_port())


class Supervisor:
    """Watches the engine and the gateway in front of it."""

    def __init__(self, engine: Child, gateway: Child, settings: Settings) -> None:
        self._settings = settings
        self.url = _url(_WILDCARDS.get(settings.host, settings.host), settings.port)
        self._children = {child.name: child for child in (engine, gateway)}
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._latest = {child.name: "" for child in (engine, gateway)}
        self._talkative = False
        for child in (engine, gateway):
            child.follow(partial(self._on_line, child.name))

    def wait_until_ready(self, options: ServeOptions, *, talkative: bool = True) -> None:
        """Return when the gateway is ready, which needs the engine. ``talkative``: print the programs' output from then on.

        Raises :class:`CommandError` if one of them ends.
        """
        started = time.monotonic()
        what = options.model or "the demo model"
        self._console.print(f"Loading {what} …", soft_wrap=True)
        with self._console.status("") as status, httpx.Client(trust_env=False) as client:
            while not _answers(client, f"{self.url}/readyz"):
                self.check_running()
                self._show_progress(status, time.monotonic() - started)
                time.sleep(_POLL_SECONDS)
        self._talkative = talkative
        self._console.print(f"Ready after {time.monotonic() - started:.1f} s: {self.url}/v1")

    def say_ready(self, options: ServeOptions) -> None:
        """Print calls to try, and for the demo model without keys an example with its scores."""
        out = Console(highlight=False)
        with_key = self._settings.api_keys_file is not None
        if options.model is None and not with_key:
            show_example(out, self.url, options.name)
        guides = options.model is None or options.lenvm_model is not None
        show_calls(out, self.url, options.name, with_key=with_key, guides=guides)
        if self._settings.console:
            self._console.print(f"\nOpen the web console: {self.url}/", soft_wrap=True)
        self._console.print("\nServing; press Ctrl-C to stop.")

    def watch(self) -> None:
        """Never return. Raises :class:`CommandError` when a process ends; a signal raises :class:`_Stop`."""
        while True:
            self.check_running()
            time.sleep(_POLL_SECONDS)

    def say_stopping(self) -> None:
        """Print that the programs stop, and suppress their further output."""
        self._talkative = False
        seconds = self._settings.grace_seconds
        self._console.print(f"Stopping; open requests have {seconds:g} s to end. Press Ctrl-C again to end at once.")

    def check_running(self) -> None:
        """Raise :class:`CommandError` if one of the programs has ended."""
        for child in self._children.values():
            if not child.running:
                child.read_to_the_end()
                raise CommandError(f"the {child.name} has ended: {self._why(child)}")

    def _why(self, child: Child) -> str:
        line, prefix = self._latest[child.name], f"{child.name}: "
        if line.startswith(prefix):
            return line.removeprefix(prefix)
        return f"{child.ending}; its last line of output: {line}" if line else child.ending

    def _show_progress(self, status: Status, seconds: float) -> None:
        status.update(f"{seconds:.0f} s  {self._latest['engine'][:100]}")

    def _on_line(self, name: str, line: str) -> None:
        """Store a line of a child, in its reader thread. A line with the program's name is its reason to end, so it is kept."""
        prefix = f"{name}: "
        if not line:
            return
        if line.startswith(prefix) or not self._latest[name].startswith(prefix):
            self._latest[name] = line
        if self._talkative:
            self._console.print(f"{prefix}{line.removeprefix(prefix)}", soft_wrap=True)


@contextmanager
def children(options: ServeOptions, settings: Settings, models: _Models) -> Iterator[Supervisor]:
    """Start both programs. In every case end both, the gateway first so that it can finish its responses."""
    engine = Child("engine", _engine_arguments(options, models, urlsplit(settings.engines[0]).port or 0))
    gateway = Child("gateway", _gateway_arguments(settings))
    supervisor = Supervisor(engine, gateway, settings)
    try:
        yield supervisor
    except _Stop:
        supervisor.say_stopping()
        raise
    finally:
        try:
            gateway.stop(settings.grace_seconds + _SPARE_SECONDS)
            engine.stop(_ENGINE_SECONDS)
        finally:  # reached early if a second signal interrupts the wait
            gateway.kill()
            engine.kill()


def _engine_arguments(options: ServeOptions, models: _Models, port: int) -> list[str]:
    arguments = ["engine", "--model", models.model, "--host", "127.0.0.1", "--port", str(port), "--name", options.name]
    if models.lenvm is not None:
        arguments += ["--lenvm-model", models.lenvm]
    for name in _ENGINE_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            arguments += ["--" + name.replace("_", "-"), str(value)]
    return arguments


def _gateway_arguments(settings: Settings) -> list[str]:
    """Return the settings that may differ from the environment, which the gateway reads too."""
    arguments = ["gateway", "--engine", settings.engines[0], "--host", settings.host, "--port", str(settings.port)]
    if settings.api_keys_file is not None:
        arguments += ["--api-keys-file", str(settings.api_keys_file)]
    for setting, option in _OF_THE_MODEL.items():
        flag = "--" + option.replace("_", "-")
        arguments += [argument for chosen in getattr(settings, setting) for argument in (flag, chosen)]
    return arguments


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Convert the signals that ask a program to end into :class:`_Stop`."""

    def stop(_: int, __: FrameType | None) -> None:
        raise _Stop

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_port(settings: Settings) -> None:
    """Check that the gateway can listen, before anything is loaded. Raises :class:`CommandError`."""
    try:
        host = "0.0.0.0" if settings.host == "*" else settings.host  # noqa: S104  the operator asks for all addresses
        family, kind, protocol, _, address = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        remedy = "stop what uses it, or choose another with --port" if used else "check --host and --port"
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"cannot listen on {settings.host} port {settings.port} ({reason}); {remedy}") from None


def models_of(options: ServeOptions) -> _Models:
    """Return the models to load: the demo models if none is named. A length model of the user applies to both cases."""
    if options.model is not None:
        return _Models(options.model, options.lenvm_model)
    return _Models(_demo_model("base"), options.lenvm_model or _demo_model("lenvm"))


def _demo_model(name: str) -> str:
    spec = importlib.util.find_spec("engine")
    roots = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(roots or [])), "demo", "models", name)
    if not path.is_dir():
        raise CommandError("the demo models are missing from this installation; name a model with --model")
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _answers(client: httpx.Client, url: str) -> bool:
    """Return whether the gateway is ready. Raises :class:`CommandError` if waiting cannot help."""
    try:
        response = client.get(url)
    except httpx.TransportError:
        return False
    if not response.is_success and (error := response.json()["error"])["code"] == UnusableModel.code:
        raise CommandError(error["message"])
    return response.is_success


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
