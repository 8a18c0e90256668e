"""The worker processes that read requests: their connections, scheduling of jobs, time limits, and replacement of workers that end.

Jobs wait in a fair queue between tenants, bounded in number and bytes. Bulk jobs, which are large or whose time is not bounded by
their size, use at most half of the workers, so that a short chat never waits behind a body of many megabytes or a hostile schema,
and the memory of bulk jobs is bounded. The block of :meth:`Workers.job` holds a worker. If the block is left while the worker is
busy, because the client left, the worker gets a short grace period to finish and is killed after it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO, Literal, cast
from weakref import WeakValueDictionary

import msgspec

from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.errors import Overloaded
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.text.vocabulary import TokenizerError, Vocabulary, VocabularyTable
from yardstick_llm.gateway.workers.messages import (
    HEADER,
    Answer,
    Ended,
    Forget,
    Fork,
    Forked,
    Job,
    Load,
    Loaded,
    Order,
    Report,
    frame,
)
from yardstick_llm.gateway.workers.queue import Capacity, JobQueue, QueuedJob

logger = logging.getLogger(__name__)

BULK = 64 << 10
"""Size of a body in bytes, or of text in characters, above which a job is bulk; it takes some 50 ms."""
MAX_WAIT_SECONDS = 30.0
"""Longest wait for a worker."""
RESTART_SECONDS = 0.5
"""Pause before the restart of a fork server that ended, and before replacing a worker that ended before its first answer."""
JOINED_BYTES = 1 << 16
"""Longest body that is sent in one write with its message."""
GRACE_SECONDS = 0.3
"""Time that a worker has to finish a job whose caller has left."""

Loss = Literal["slow", "template", "memory", "crash"]
"""Reason why a worker ended: the gateway killed it at the time limit, the kernel killed it while it rendered a template, it
exceeded its memory limit, or something else."""

_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_report = msgspec.msgpack.Decoder(Report)
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
        self.pid = 0
        self._closed = closed
        self._handle: int | None = None
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._answer: asyncio.Future[memoryview] | None = None
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
        """Wait for the end of an abandoned job. Raises :class:`TimeoutError` after :data:`GRACE_SECONDS`."""
        if self._sending:
            raise TimeoutError
        if self._answer is not None:
            done, _ = await asyncio.wait([self._answer], timeout=GRACE_SECONDS)
            if not done:
                raise TimeoutError

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
        """Collect an answer and deliver it when it is complete. A worker has one job at a time, so nothing follows an answer. A
        bytearray grows in place; to join parts at the end takes a millisecond for each megabyte."""
        self._buffer += data
        if len(self._buffer) < HEADER.size:
            return
        size, _body, last = HEADER.unpack_from(self._buffer)
        if len(self._buffer) < HEADER.size + size:
            return
        answer, self._buffer = memoryview(self._buffer)[HEADER.size :], bytearray()
        self.retiring |= last
        self.answered += 1
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def connection_lost(self, _: Exception | None) -> None:
        """Fail the job in progress and release the process handle."""
        self.crashed = not self.retiring
        self.retiring = True
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


class ForksLostError(Exception):
    """The fork server ended while it carried out an order."""


class Forks(asyncio.Protocol):
    """One fork server process. Each order is sent after the previous one has been answered."""

    _transport: asyncio.BaseTransport
    _collected: asyncio.Future[int]

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, ended: Callable[[int, int], None]) -> None:
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


def start_fork_server(control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a fork server that serves ``control``."""
    path = os.pathsep.join(place for place in sys.path if place)
    return subprocess.Popen(  # noqa: S603 - runs at start and after a crash; takes 1 to 2 ms
        [sys.executable, "-m", "yardstick_llm.gateway.requests.worker", str(control.fileno())],
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


class Workers:
    """Runs the fork server and the workers between :meth:`start` and :meth:`stop`."""

    def __init__(self, capacity: Capacity, telemetry: Telemetry) -> None:
        self._capacity = capacity
        self._telemetry = telemetry
        self._queue = JobQueue(capacity)
        self._idle: list[Channel] = []
        self._channels: dict[int, Channel] = {}  # by process id, until the fork server reports the end of the process
        self._open: set[Channel] = set()
        self._early_ends: dict[int, int] = {}  # signals of processes that ended before they were in _channels
        self._forking = 0
        self._files: dict[str, TokenizerFiles] = {}  # by key
        self._vocabularies: WeakValueDictionary[str, Vocabulary] = WeakValueDictionary()
        self._generation = 0
        self._forks: Forks | None = None
        self._running = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        telemetry.text.queue.set_function(lambda: len(self._queue))

    def start(self) -> None:
        """Start the fork server, and restart it when it ends."""
        self._spawn(self._keep_forks())

    async def stop(self) -> None:
        """End all processes."""
        self._files = {}  # a worker that ends from here on is not replaced
        await end_tasks(*self._tasks)
        channels = list(self._open)
        for channel in channels:
            channel.kill()
        await asyncio.gather(*[channel.gone for channel in channels])
        if self._forks:
            await self._forks.stop()

    async def load(self, files: TokenizerFiles) -> tuple[str, Vocabulary]:
        """Load a model's tokeniser and template in all workers, for as long as its vocabulary is in use. Returns its key and the
        vocabulary. Raises :class:`TokenizerError`."""
        key = await asyncio.to_thread(_digest, files)
        for _ in range(2):
            if vocabulary := self._vocabularies.get(key):
                return key, vocabulary
            await self._running.wait()
            assert self._forks is not None
            try:
                table = await asyncio.shield(self._forks.load(key, files))
            except ForksLostError:
                await asyncio.sleep(2 * RESTART_SECONDS)
                continue
            if known := self._vocabularies.get(key):  # another replica's load finished first
                return key, known
            vocabulary = Vocabulary(table)
            loop = asyncio.get_running_loop()
            weakref.finalize(vocabulary, self._forget_soon, loop, key).atexit = False
            self._vocabularies[key] = vocabulary
            self._files[key] = files
            self._renew()
            return key, vocabulary
        raise TokenizerError("tokenizer.json cannot be read: the process that reads it ends")

    def files(self, key: str) -> TokenizerFiles:
        """Return the files of a model whose tokeniser is loaded. ``key``: from :meth:`load`."""
        return self._files[key]

    @asynccontextmanager
    async def job(self, *, tenant: str, size: int, bulk: bool, weight: float = 1.0) -> AsyncIterator[Channel]:
        """Hold a worker for one job whose body has ``size`` bytes. ``weight`` scales the tenant's share. Raises
        :class:`Overloaded`."""
        job = QueuedJob(tenant, size, bulk and self._capacity.workers > 1, weight)
        began = time.perf_counter()
        channel = self._idle.pop() if self._idle and self._queue.passes(job) else await self._wait(job)
        self._telemetry.text.wait_seconds.observe(time.perf_counter() - began)
        try:
            yield channel
        finally:
            self._release(channel, job)

    async def _wait(self, job: QueuedJob) -> Channel:
        ready: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        job.ready = ready
        self._queue.push(job)
        self._dispatch()
        if ready.done():
            return ready.result()
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await ready
        except (TimeoutError, asyncio.CancelledError) as error:
            if ready.done() and not ready.cancelled():
                self._release(ready.result(), job)
            else:
                self._queue.discard(job)
            if isinstance(error, TimeoutError):
                raise Overloaded("The request waited too long to be tokenised; try again later.", retry_after=5) from None
            raise

    def _dispatch(self) -> None:
        """Assign idle workers to waiting jobs."""
        while self._idle and (job := self._queue.pop()):
            assert job.ready is not None
            job.ready.set_result(self._idle.pop())

    def _release(self, channel: Channel, job: QueuedJob) -> None:
        """Release a worker whose job ended or was abandoned."""
        if channel.busy:
            self._spawn(self._clear(channel, job))
            return
        self._queue.ended(job)
        if channel.retiring or channel.generation != self._generation:
            channel.close()
        else:
            self._idle.append(channel)
        self._dispatch()

    async def _clear(self, channel: Channel, job: QueuedJob) -> None:
        """Make a worker with an abandoned job ready for the next one, or kill it."""
        try:
            await channel.clear()
        except TimeoutError:
            self._telemetry.text.ended.labels("left").inc()
            channel.kill()
        self._release(channel, job)

    def _renew(self) -> None:
        """Replace the workers by ones that have all tokenisers: idle ones now, the others after their jobs."""
        self._generation += 1
        idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
        self._replenish()

    def _replenish(self) -> None:
        """Fork as many workers as are missing."""
        started = [channel for channel in self._open if channel.pid and not channel.retiring]
        current = sum(channel.generation == self._generation for channel in started)
        for _ in range(current + self._forking, self._capacity.workers if self._files else 0):
            self._forking += 1
            self._spawn(self._fork())

    async def _fork(self) -> None:
        """Fork one worker."""
        await self._running.wait()
        assert self._forks is not None
        channel, theirs = await connect(self._generation, self._closed)
        self._open.add(channel)
        try:
            with theirs:
                channel.started(await self._forks.fork(self._capacity.job_mib, theirs))
        except ForksLostError:
            channel.close()
            return
        finally:
            self._forking -= 1
        self._channels[channel.pid] = channel
        if (signal_number := self._early_ends.pop(channel.pid, None)) is not None:
            self._ended(channel.pid, signal_number)
        elif channel.generation == self._generation and not channel.retiring:
            self._idle.append(channel)
            self._dispatch()
        else:
            channel.close()
            self._replenish()

    def _closed(self, channel: Channel) -> None:
        """Replace a worker whose connection has ended."""
        self._open.discard(channel)
        if channel in self._idle:
            self._idle.remove(channel)
        if channel.crashed and not channel.answered:
            asyncio.get_running_loop().call_later(RESTART_SECONDS, self._replenish)
        else:
            self._replenish()

    def _ended(self, pid: int, signal_number: int) -> None:
        """Record the end of a worker process, as reported by the fork server."""
        if channel := self._channels.pop(pid, None):
            channel.ended(signal_number)
        else:
            self._early_ends[pid] = signal_number

    async def _keep_forks(self) -> None:
        while True:
            try:
                self._forks = await Forks.start(self._ended)
                self._generation += 1
                for key, files in list(self._files.items()):
                    await self._forks.load(key, files)
                self._running.set()
                self._replenish()
                await asyncio.shield(self._forks.lost)
            except (OSError, ForksLostError, TokenizerError) as error:
                logger.warning("the fork server of the text workers does not start: %s", error)
                if self._forks is not None:
                    await self._forks.stop()
            else:
                logger.warning("the fork server of the text workers has ended; another is started")
            self._running.clear()
            for pid in list(self._channels):
                self._ended(pid, signal.SIGKILL)
            self._early_ends.clear()
            await asyncio.sleep(RESTART_SECONDS)

    def _forget_soon(self, loop: asyncio.AbstractEventLoop, key: str) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._forget, key)

    def _forget(self, key: str) -> None:
        """Drop a tokeniser and template that no model uses any more."""
        if key not in self._vocabularies and key in self._files and self._forks:
            del self._files[key]
            self._spawn(self._forget_in(self._forks, key))

    @staticmethod
    async def _forget_in(forks: Forks, key: str) -> None:
        with contextlib.suppress(ForksLostError):
            await forks.forget(key)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def default_workers() -> int:
    """Return the number of processors available to this process, but at least two and at most four."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(2, min(4, available))


def _digest(files: TokenizerFiles) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(files), digest_size=16).hexdigest()
