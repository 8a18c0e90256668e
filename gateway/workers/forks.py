"""The gateway's connection to the fork server: starts it, loads tokenisers, forks workers, and reports how workers end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec

from engine.wire import TokenizerFiles
from gateway.text.spelling import TokenizerError
from gateway.text.vocabulary import VocabularyTable
from gateway.workers.messages import HEADER, Ended, Forget, Fork, Forked, Load, Loaded, Order, Report, frame

logger = logging.getLogger(__name__)

_report = msgspec.msgpack.Decoder(Report)


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that is used here."""

    pid: int

    def kill(self) -> None:
        """End the process."""

    def wait(self) -> int:
        """Wait until the process has ended."""


class ForksLostError(Exception):
    """The fork server ended while it carried out an order."""


class Forks(asyncio.Protocol):
    """One fork server process. Each order is sent after the previous one has been answered."""

    _transport: asyncio.BaseTransport
    _collected: asyncio.Future[int]

    def __init__(self, process: Process, control: socket.socket, ended: Callable[[int, int], None]) -> None:
        """``ended``: called with process id and signal when a worker has ended."""
        self._process = process
        self._socket = control
        self._ended = ended
        self._orders = asyncio.Lock()
        self._buffer = bytearray()
        self._reply: asyncio.Future[Loaded | Forked] | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has ended."""

    @classmethod
    async def start(cls, ended: Callable[[int, int], None]) -> Forks:
        """Start the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_fork_server(theirs)
        forks = cls(process, ours, ended)
        forks._transport, _ = await asyncio.get_running_loop().create_connection(lambda: forks, sock=ours.dup())
        return forks

    async def load(self, key: str, files: TokenizerFiles) -> VocabularyTable:
        """Load a model's tokeniser and template. Raises :class:`TokenizerError`, :class:`ForksLostError`."""
        with _file() as given, _file() as table:
            await asyncio.to_thread(_write, given, files)
            loaded = await self._order(Load(key), given.fileno(), table.fileno())
            assert isinstance(loaded, Loaded)
            if loaded.problem is not None:
                raise TokenizerError(loaded.problem)
            return await asyncio.to_thread(_read_table, table)

    async def forget(self, key: str) -> None:
        """Drop a model's tokeniser and template. Raises :class:`ForksLostError`."""
        await self._order(Forget(key))

    async def fork(self, job_mib: int, connection: socket.socket) -> int:
        """Fork a worker that serves ``connection`` and return its process id. Raises :class:`ForksLostError`."""
        forked = await self._order(Fork(job_mib), connection.fileno())
        assert isinstance(forked, Forked)
        return forked.pid

    async def stop(self) -> None:
        """End the process, and with it all workers."""
        self._transport.close()
        self._process.kill()
        await self.lost
        await self._collected

    async def _order(self, order: Order, *files: int) -> Loaded | Forked:
        async with self._orders:
            if self.lost.done():
                raise ForksLostError
            self._reply = asyncio.get_running_loop().create_future()
            try:
                socket.send_fds(self._socket, [frame(order)], files)
                return await self._reply
            except OSError:
                raise ForksLostError from None

    def data_received(self, data: bytes) -> None:
        """Process reports that arrived."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            report = _report.decode(bytes(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
            if isinstance(report, Ended):
                self._ended(report.pid, report.signal)
            elif self._reply is not None and not self._reply.done():
                self._reply.set_result(report)

    def connection_lost(self, _: Exception | None) -> None:
        """Fail the order in progress and collect the ended process."""
        self._socket.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ForksLostError())
        self._process.kill()
        self._collected = asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        self.lost.set_result(None)


def start_fork_server(control: socket.socket) -> Process:
    """Start a fork server that serves ``control``."""
    path = os.pathsep.join(place for place in sys.path if place)
    return subprocess.Popen(  # noqa: S603 - runs at start and after a crash; takes 1 to 2 ms
        [sys.executable, "-m", "gateway.reading.forkserver", str(control.fileno())],
        # A worker without memory could not print a backtrace: it would hang.
        env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
    )


def _file() -> BinaryIO:
    """Return a new file in memory: a full disk would end the fork server. Systems other than Linux have no such files."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("tokeniser"), "w+b")
    return tempfile.TemporaryFile()


def _write(file: BinaryIO, files: TokenizerFiles) -> None:
    file.write(msgspec.msgpack.encode(files))
    file.flush()
    file.seek(0)


def _read_table(file: BinaryIO) -> VocabularyTable:
    file.seek(0)
    return msgspec.msgpack.decode(file.read(), type=VocabularyTable)
