"""Fork servers of text workers that start in milliseconds, because a process that has imported their modules forks them.

A test process starts this warm process (``python -m tests.warm DESCRIPTOR``) when a gateway in the test process needs its first
fork server. Gateways that run as processes start their fork servers as in production, as do the tests of
``gateway.text.workers``.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import NoReturn

_PID_BYTES = 8
_lock = threading.Lock()
"""Gateways in several threads share the connection to the warm process."""


class WarmProcess:
    """A child of the warm process, which collects it when it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended
            self._descriptor = None

    def kill(self) -> None:
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> int:
        if self._descriptor is not None:
            select.select([self._descriptor], [], [])
            os.close(self._descriptor)
        return 0


def start_fork_server(control: socket.socket) -> WarmProcess:
    """Stands for :func:`gateway.text.forks.start_fork_server`."""
    with _lock:
        connection = _connection()
        socket.send_fds(connection, [b"fork"], [control.fileno()])
        return WarmProcess(int.from_bytes(connection.recv(_PID_BYTES, socket.MSG_WAITALL)))


@cache
def _connection() -> socket.socket:
    """Start the warm process; return the connection to it, whose end is its end."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _serve(connection: socket.socket) -> None:
    """Fork a fork server for each message, until the test process closes the connection."""
    import gateway.text.forkserver  # noqa: F401 - what every fork then has

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects children that end
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(connection, len(b"fork"), 1)
        if not data:
            return
        (control,) = descriptors
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be_fork_server(control)
        os.close(control)
        connection.sendall(pid.to_bytes(_PID_BYTES))


def _be_fork_server(control: int) -> NoReturn:
    from gateway.text import forkserver

    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = ["gateway.text.forkserver", str(control)]
        status = forkserver.main()
    finally:
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)
