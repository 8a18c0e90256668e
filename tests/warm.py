"""Programs of this project that start in milliseconds, because a warm process that has imported their modules forks them.

:func:`enable` replaces the system call behind :mod:`subprocess` in this process, for commands ``python -m MODULE`` with a module
of :data:`IMPORTS`. The first one starts the warm process (``python -m tests.warm DESCRIPTOR``), which imports what a program needs
when the first of its kind starts. A program is a child of the process that starts it, has the files, variables and session that the
command asks for, and starts its own programs warm. All other commands start as in production, as do those with variables that
libraries read when they are imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from yardstick_llm.engine.server.loop_client import with_defaults
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.process.signals import ending_with

_SERVER = ("litestar.plugins.attrs", "litestar.plugins.pydantic", "uvicorn.lifespan.on", "uvicorn.protocols.websockets.auto")
_SERVER += ("uvicorn.loops.uvloop", "anyio._backends._asyncio", "httpcore")
"""Modules that Litestar, Uvicorn and httpx import with the first application, server and client."""
_GATEWAY = (*_SERVER, "uvloop", "httptools", "uvicorn.server", "yardstick_llm.gateway.app", "yardstick_llm.gateway.requests.worker")
_COMMANDS = ("rich.progress", "typer", "yardstick_llm.gateway.commands.serve", "yardstick_llm.gateway.commands.runner")
_ENGINE = (
    *_SERVER,
    "yardstick_llm.engine.server.options",
    "yardstick_llm.engine.server.app",
    "yardstick_llm.engine.loop.build",
    "yardstick_llm.engine.models.source",
    "yardstick_llm.kernels.native",
)
_ALL = _GATEWAY + _COMMANDS + _ENGINE
_LOAD = ("yardstick_llm.loadgen.cli", "yardstick_llm.loadgen.runner")
IMPORTS = {
    "yardstick_llm.gateway": _GATEWAY,
    "yardstick_llm.gateway.requests.worker": _GATEWAY,
    "yardstick_llm.gateway.cli": _GATEWAY + _COMMANDS,
    "yardstick_llm.gateway.cli serve": _ALL,
    "yardstick_llm.gateway.cli embed": _ALL,
    "yardstick_llm.gateway.cli rerank": _ALL,
    "yardstick_llm.engine": _ENGINE,
    "yardstick_llm.engine.server.loop_process": _ENGINE,
    "yardstick_llm.engine.training": ("yardstick_llm.engine.training.train",),
    "yardstick_llm.engine.runner.distributed.worker": (*_ENGINE, "yardstick_llm.engine.runner.distributed.worker"),
    "yardstick_llm.loadgen": _LOAD,
}
"""Imports of programs and of those that they start, by module, or by module and first argument."""
_STARTERS = (
    "yardstick_llm.gateway",
    "yardstick_llm.gateway.cli",
    "yardstick_llm.engine",
    "yardstick_llm.engine.server.loop_process",
    "yardstick_llm.engine.training",
)
"""Modules that start others."""
_NOT_FOR_LIBRARIES = ("YARDSTICK_", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED", "COLUMNS", "TOKENIZERS_", "RUST_", "MALLOC_")
"""Beginnings of the names of variables that no library reads when it is imported."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_MESSAGE_BYTES, _MESSAGE_FILES, _PID_BYTES = 1 << 17, 16, 8
_HIGH = 100
"""Descriptors from here on are not among those that a command names."""
_REPOSITORY = Path(__file__).parents[1]
_libc = ctypes.CDLL(None)
_fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


class Command(msgspec.Struct):
    """A message to a warm process. It has files with it, whose numbers in the new program are ``descriptors``."""

    module: str
    arguments: list[str]
    directory: str
    variables: dict[str, str]
    descriptors: list[int]
    new_session: bool
    new_group: bool
    dies_with_parent: bool


class WarmProcess:
    """The connection of this process to a warm process, its child."""

    def __init__(self, connection: socket.socket, variables: Mapping[str, str]) -> None:
        """``variables``: of the warm process when it imported its modules."""
        self._connection = connection
        self._variables = _read_by_libraries(variables)
        self._lock = threading.Lock()

    def fits(self, command: Command) -> bool:
        """Whether the variables of ``command`` change nothing in the imported modules."""
        return _read_by_libraries(command.variables) == self._variables

    def fork(self, command: Command, files: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._connection, [msgspec.json.encode(command)], files)
            pid = int.from_bytes(self._connection.recv(_PID_BYTES))
        if pid == 0:
            raise RuntimeError("The warm process has ended; its error is on the standard error stream.")
        return pid


_process: WarmProcess | None = None
_others: dict[tuple[str, ...], str] = {}
_enabled = False


def enable(process: WarmProcess | None = None, others: Mapping[tuple[str, ...], str] | None = None) -> None:
    """Start the programs of this process warm.

    ``process``: to use instead of a new one; ``others``: modules that are run for commands of another form.
    """
    global _enabled, _process
    _process = process or _process
    _others.update(others or {})
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    subprocess._fork_exec = _start  # type: ignore[attr-defined]
    _enabled = True


@contextmanager
def as_in_production() -> Iterator[None]:
    """Start programs as in production."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def _start(arguments: Any, executables: Any, close: bool, keep: Any, directory: Any, variables: Any, *rest: Any) -> int:
    """Stands for ``_posixsubprocess.fork_exec``."""
    stdin, stdout, stderr, reports, new_session, group, before = (rest[place] for place in (0, 3, 5, 7, 9, 10, 15))
    words = _module_and_arguments(arguments)
    warm = _enabled and directory is None and words
    dies_with_parent = getattr(before, "__qualname__", "").startswith(f"{ending_with.__qualname__}.")
    if warm and (before is None or dies_with_parent):
        others = [file for file in keep if file != reports]  # the program reports no failure of exec
        files = [place if file == -1 else file for place, file in enumerate((stdin, stdout, stderr))]
        given = dict(os.environ) if variables is None else dict(os.fsdecode(each).split("=", 1) for each in variables)
        session = new_session, group == 0, dies_with_parent
        command = Command(words[0], words[1:], str(Path.cwd()), given, [0, 1, 2, *others], *session)
        if (process := _process or _new_process()).fits(command):
            return process.fork(command, files + others)
    return _fork_exec(arguments, executables, close, keep, directory, variables, *rest)


def _module_and_arguments(command: Any) -> list[str]:
    """Return what a warm process runs for ``command``; an empty list if it cannot run it."""
    if command[:2] == [sys.executable, "-m"] and command[2] in IMPORTS:
        return list(map(os.fsdecode, command[2:]))
    other = _others.get(tuple(command))
    return [other] if other else []


def _new_process() -> WarmProcess:
    global _process
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = with_defaults(os.environ)
    with theirs, as_in_production():
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        fd = theirs.fileno()
        process = subprocess.Popen(command, env=variables, pass_fds=[fd], stdin=subprocess.DEVNULL, cwd=_REPOSITORY)
    atexit.register(lambda: (ours.close(), process.wait()))
    _process = WarmProcess(ours, variables)
    return _process


def _read_by_libraries(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in with_defaults(variables).items() if not name.startswith(_NOT_FOR_LIBRARIES)}


def serve(connection: socket.socket) -> None:
    """Fork a program for each command, until the other end of ``connection`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group
    while True:
        data, files, _flags, _address = socket.recv_fds(connection, _MESSAGE_BYTES, _MESSAGE_FILES)
        if not data:
            return
        command = msgspec.json.decode(data, type=Command)
        first = f"{command.module} {command.arguments[0]}" if command.arguments else ""
        for module in IMPORTS.get(first) or IMPORTS.get(command.module, ()):
            importlib.import_module(module)
        if "yardstick_llm.gateway.requests.worker" in sys.modules:
            _read_a_tokenizer()
        gc.freeze()
        pid = _forked(command, files, connection)
        for file in files:
            os.close(file)
        with suppress(BrokenPipeError):
            connection.sendall(pid.to_bytes(_PID_BYTES))


@cache
def _read_a_tokenizer() -> None:
    """What the first tokeniser of a process computes for all others takes 70 ms, which each gateway would spend."""
    from tests.fakes import library
    from yardstick_llm.gateway.text.tokenizer import Tokenizer

    Tokenizer.from_files(TokenizerFiles(library().to_str().encode(), "", {}, None, ""))


def _forked(command: Command, files: list[int], connection: socket.socket) -> int:
    """Fork twice and return the process id of the program: the kernel gives an orphan to the nearest ancestor that asked for them
    in :func:`enable`."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if (pid := os.fork()) == 0:
            for file in (reader, writer, connection.detach()):
                os.close(file)
            while os.getppid() == between:
                time.sleep(0.0002)
            _run(command, files)
        os.write(writer, pid.to_bytes(_PID_BYTES))
        os._exit(0)
    os.close(writer)
    pid = int.from_bytes(os.read(reader, _PID_BYTES))
    os.close(reader)
    os.waitpid(between, 0)
    return pid


def _run(command: Command, files: list[int]) -> NoReturn:
    status = 1
    try:
        _prepare(command, files)
        warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def _prepare(command: Command, files: list[int]) -> None:
    """Give this process what the command asks for."""
    _libc.prctl(_PR_SET_NAME, b"python")
    if command.new_session:
        os.setsid()
    if command.new_group:
        os.setpgid(0, 0)
    if command.dies_with_parent:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl(file, F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file, place in zip(high, command.descriptors, strict=True):
        os.dup2(file, place)
    for file in {*files, *high} - {*command.descriptors}:
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - to the end
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(command.directory)
    os.environ.clear()
    os.environ.update(command.variables)
    sys.argv = ["", *command.arguments]
    if command.module in _STARTERS:
        _keep_warm()


def _keep_warm() -> None:
    """Fork the warm process of this program, before the program changes anything."""
    global _process
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        with suppress(BaseException):
            _libc.prctl(_PR_SET_NAME, b"warm")
            null = os.open(os.devnull, os.O_RDWR)
            theirs = socket.socket(fileno=fcntl(theirs.detach(), F_DUPFD_CLOEXEC, _HIGH))
            for place in range(3):
                os.dup2(null, place)
            os.closerange(3, _HIGH)  # the program's files, whose other ends wait until it closes them
            serve(theirs)
        os._exit(0)
    theirs.close()
    enable()
    ours = socket.socket(fileno=fcntl(ours.detach(), F_DUPFD_CLOEXEC, _HIGH))
    _process = WarmProcess(ours, os.environ)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
