"""The gateway's connection to one worker process: one job at a time, with a time limit after which the worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Literal, cast

import msgspec

from gateway.workers.messages import HEADER, Answer, Decode, Drop, Job, frame

JOINED_BYTES = 1 << 16
"""Longest body that is sent in one write with its message."""
GRACE_SECONDS = 0.3
"""Time that a worker has to finish a job whose caller has left."""

Loss = Literal["slow", "template", "memory", "crash"]
"""Reason why a worker ended: the gateway killed it at the time limit, the kernel killed it while it rendered a template, it
exceeded its memory limit, or something else."""

_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_LOSS_OF_SIGNAL: dict[int, Loss] = {signal.SIGVTALRM: "template", signal.SIGABRT: "memory"}


class WorkerLostError(Exception):
    """The worker ended before it answered."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.loss: Loss = loss


class Channel(asyncio.Protocol):
    """One worker process and the connection to it."""

    def __init__(self, generation: int, closed: Callable[[Channel], None]) -> None:
        """``generation``: version of the worker's set of tokenisers. ``closed``: called when the connection has ended."""
        self.generation = generation
        self.answered = 0
        """Number of jobs that the worker has answered."""
        self.retiring = False
        """Whether the worker gets no more jobs."""
        self.crashed = False
        """Whether the worker ended by itself."""
        self.keeps_request = False
        """Whether the worker keeps a decoded request that it has not read yet."""
        self.pid = 0
        self._closed = closed
        self._handle: int | None = None
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._wanted = HEADER.size
        self._in_header = True
        self._answer: asyncio.Future[bytearray | memoryview] | None = None
        self._lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Number of the signal that ended the process."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""
        self._slow = False
        self._sending = False
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def busy(self) -> bool:
        """Whether a job is in progress."""
        return self._answer is not None

    def started(self, pid: int) -> None:
        """Record the process id of the started process."""
        self.pid = pid
        try:
            self._handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not on Linux, or the process has ended
            self._handle = None

    def ended(self, signal_number: int) -> None:
        """Record the end of the process and its signal, and close the connection."""
        if not self._lost.done():
            self._lost.set_result(signal_number)
        self._transport.close()

    async def ask(self, job: Job, body: Sequence[bytes] = (), *, seconds: float) -> Answer:
        """Return the answer to ``job``. Raises :class:`WorkerLostError`, also after ``seconds``."""
        if self._transport.is_closing():  # lost after the job got this worker; nothing would report the loss again
            raise WorkerLostError(await self._loss())
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        timer = loop.call_later(seconds, self._time_is_up)
        try:
            await self._send(frame(job, sum(map(len, body))), body)
            self.keeps_request = isinstance(job, Decode)
            return _answer.decode(await self._answer)
        except asyncio.CancelledError:
            if self._answer is not None:  # the answer stays awaited
                self._answer = loop.create_future()
            raise
        except ConnectionError:
            raise WorkerLostError(await self._loss()) from None
        finally:
            timer.cancel()

    async def clear(self) -> None:
        """Wait for the end of an abandoned job and drop a kept request. Raises :class:`WorkerLostError`, and
        :class:`TimeoutError` after :data:`GRACE_SECONDS`."""
        if self._sending:
            raise TimeoutError
        if self._answer is not None:
            done, _ = await asyncio.wait([self._answer], timeout=GRACE_SECONDS)
            if not done:
                raise TimeoutError
        if self.keeps_request and not self.retiring:
            await self.ask(Drop(), seconds=GRACE_SECONDS)

    def close(self) -> None:
        """Close the connection of an idle worker, which ends the process."""
        self.retiring = True
        self._transport.close()

    def kill(self) -> None:
        """Kill the process."""
        self.retiring = True
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid and not self._lost.done():
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._transport.close()

    async def _send(self, start: bytes, body: Sequence[bytes]) -> None:
        """Write a message without joining the parts of a large body."""
        if not body or (len(body) == 1 and len(body[0]) <= JOINED_BYTES):
            self._transport.write(start + body[0] if body else start)
            return
        self._sending = True
        self._transport.write(start)
        for part in body:
            await self._writable.wait()
            if self._transport.is_closing():
                raise ConnectionError
            self._transport.write(part)
        self._sending = False

    def _time_is_up(self) -> None:
        self._slow = True
        self.kill()

    async def _loss(self) -> Loss:
        """Return why the process ended. The fork server may report its signal late, so wait for it up to 1 s."""
        if self._slow:
            return "slow"
        await asyncio.wait([self._lost], timeout=1)
        return _LOSS_OF_SIGNAL.get(self._lost.result(), "crash") if self._lost.done() else "crash"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Collect an answer and deliver it when it is complete. A bytearray grows in place; to join parts at the end takes a
        millisecond for each megabyte."""
        if not self._buffer and self._in_header and len(data) > HEADER.size:
            size, _body, last = HEADER.unpack_from(data)
            if len(data) == HEADER.size + size:  # one answer, as nearly always
                self.retiring |= last
                self._deliver(memoryview(data)[HEADER.size :])
                return
        self._buffer += data
        while len(self._buffer) >= self._wanted:
            part, self._buffer = self._buffer, self._buffer[self._wanted :]
            if len(part) > self._wanted:
                del part[self._wanted :]
            if self._in_header:
                self._wanted, _body, last = HEADER.unpack(part)
                self.retiring |= last
            else:
                self._wanted = HEADER.size
                self._deliver(part)
            self._in_header = not self._in_header

    def _deliver(self, answer: bytearray | memoryview) -> None:
        self.answered += 1
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def connection_lost(self, _: Exception | None) -> None:
        """Fail the job in progress and release the process handle."""
        self.crashed = not self.retiring
        self.retiring = True
        self.keeps_request = False
        self._writable.set()
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(ConnectionError())
            waiting.exception()  # marks the exception as retrieved, because the caller may have left
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self.gone.set_result(None)
        self._closed(self)

    def pause_writing(self) -> None:
        """Pause writing until the worker has read more."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume writing."""
        self._writable.set()


async def connect(generation: int, closed: Callable[[Channel], None]) -> tuple[Channel, socket.socket]:
    """Create a channel, and the worker's end of its socket."""
    ours, theirs = socket.socketpair()
    try:
        _, channel = await asyncio.get_running_loop().create_connection(lambda: Channel(generation, closed), sock=ours)
    except BaseException:  # cancelled while the gateway stops
        ours.close()
        theirs.close()
        raise
    return channel, theirs
