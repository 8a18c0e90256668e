"""The worker processes that read requests: scheduling of jobs, time limits, and replacement of workers that end.

Jobs wait in a fair queue between tenants, bounded in number and bytes. Bulk jobs, which are large or whose time is not bounded by
their size, use at most half of the workers, so that a short chat never waits behind a body of many megabytes or a hostile schema,
and the memory of bulk jobs is bounded. The block of :meth:`Workers.job` holds a worker. If the block is left while the worker is
busy, because the client left, the worker gets a short grace period to finish and is killed after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
import weakref
from collections.abc import Coroutine
from weakref import WeakValueDictionary

import msgspec

from engine.wire import TokenizerFiles
from gateway.errors import Overloaded
from gateway.ops.metrics import Telemetry
from gateway.text.small import SmallTexts
from gateway.text.spelling import TokenizerError
from gateway.text.vocabulary import Vocabulary
from gateway.workers.channel import Channel, WorkerLostError, connect
from gateway.workers.forks import Forks, ForksLostError
from gateway.workers.job_queue import Capacity, JobQueue, QueuedJob

logger = logging.getLogger(__name__)

BULK = 64 << 10
"""Size of a body in bytes, or of text in characters, above which a job is bulk; it takes some 50 ms."""
MAX_WAIT_SECONDS = 30.0
"""Longest wait for a worker."""
RESTART_SECONDS = 0.5
"""Pause before the restart of a fork server that ended, and before replacing a worker that ended before its first answer."""


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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
            small = None
            if self._capacity.short_texts:
                small = await asyncio.to_thread(SmallTexts.of, table, files.chat_template, files.special_tokens)
            if known := self._vocabularies.get(key):  # another replica's load finished first
                return key, known
            vocabulary = Vocabulary(msgspec.structs.replace(table, small=None, template=None))
            vocabulary.small = small
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

    def job(self, *, tenant: str, size: int, bulk: bool, weight: float = 1.0) -> Held:
        """Hold a worker for one job whose body has ``size`` bytes. ``weight`` scales the tenant's share. Raises
        :class:`Overloaded`."""
        return Held(self, QueuedJob(tenant, size, bulk and self._capacity.workers > 1, weight))

    async def acquire(self, job: QueuedJob) -> Channel:
        """Return a worker, which the caller releases. Raises :class:`Overloaded`."""
        if self._idle and self._queue.passes(job):
            self._telemetry.text.wait_seconds.observe(0.0)
            return self._idle.pop()
        began = time.perf_counter()
        channel = await self._wait(job)
        self._telemetry.text.wait_seconds.observe(time.perf_counter() - began)
        return channel

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
                self.release(ready.result(), job)
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

    def release(self, channel: Channel, job: QueuedJob) -> None:
        """Release a worker whose job ended or was abandoned."""
        if channel.busy or channel.keeps_request:
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
        except (TimeoutError, WorkerLostError):
            self._telemetry.text.ended.labels("left").inc()
            channel.kill()
        self.release(channel, job)

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


class Held:
    """An async context manager that holds a worker. It is no generator, because every chat enters it."""

    __slots__ = ("_channel", "_job", "_workers")

    def __init__(self, workers: Workers, job: QueuedJob) -> None:
        self._workers = workers
        self._job = job

    async def __aenter__(self) -> Channel:
        self._channel = await self._workers.acquire(self._job)
        return self._channel

    async def __aexit__(self, *_: object) -> None:
        self._workers.release(self._channel, self._job)


def default_workers() -> int:
    """Return the number of processors available to this process, but at least two and at most four."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(2, min(4, available))


def _digest(files: TokenizerFiles) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(files), digest_size=16).hexdigest()
