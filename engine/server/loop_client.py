"""The server's side of the loop process: starts it, sends requests, and hands each reply to the request that waits for it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.server import channel
from yardstick_llm.engine.server.channel import BEAT_SECONDS
from yardstick_llm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


SAMPLE_SECONDS = 0.25
"""Time between two calls of :meth:`Pulse.sample`."""
LATE_SECONDS = 0.1
"""A sample that is later than this was delayed by this process itself: it was stopped, or had no CPU time."""
OVERDUE_SECONDS = BEAT_SECONDS + 0.1
"""Age of the last beat from which CPU time is sampled."""
FROZEN_SECONDS = 2.0
"""Without a beat and without CPU time for this long, the process is not ready. Gateways have moved its streams to another engine
within 5 s, which includes computing the prompt again."""
FROZEN_DEAD_SECONDS = 30.0
"""Without a beat and without CPU time for this long, the pod should be restarted. Shorter stops come from debuggers and
snapshots.
"""
LEAST_CPU_SECONDS = 0.05
"""Less CPU time than this is not work: the idle threads of libraries use some. The kernel counts in units of 0.01 s."""
STEPS_OF_PATIENCE = 4
"""A step may take this many times as long as the longest step so far, whatever ``stall_seconds`` is."""
DEAD_AFTER_STALLS = 3
"""The pod should be restarted after this many times the time after which it is not ready."""


class Pulse:
    """Times since the last progress. The clock does not run while this process itself stands still.

    It detects a loop process that makes no progress. The loop sends a beat after every step and, without work, every
    :data:`engine.server.channel.BEAT_SECONDS`. A step sends no beat while it runs, and on a CPU it may take minutes, so the CPU
    time of the loop process tells a long step from a process that hangs. A process that uses CPU time without ever completing a
    step is stalled as well, after a longer time.
    """

    def __init__(
        self, cpu_seconds: Callable[[], float], *, stall_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``cpu_seconds``: CPU time that the loop's process has used. ``stall_seconds``: longest time that a step may take."""
        self._cpu_seconds = cpu_seconds
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._sampled = self._beaten = self._worked = clock()
        self._cpu: float | None = None
        """CPU time when the process last worked; None until the first sample after a beat."""
        self._longest = 0.0
        self._froze = False

    def beat(self) -> None:
        """The loop completed a step, or waits for requests."""
        now = self._clock()
        if not self._froze:
            self._longest = max(self._longest, now - self._beaten)
        self._beaten = self._worked = now
        self._cpu, self._froze = None, False

    def sample(self) -> None:
        """Take the time and, where a beat is overdue, the CPU time."""
        now = self._clock()
        missed = now - self._sampled - SAMPLE_SECONDS
        if missed > LATE_SECONDS:
            self._beaten, self._worked = min(self._beaten + missed, now), min(self._worked + missed, now)
        self._sampled = now
        if self.silent_seconds < OVERDUE_SECONDS:
            return
        used = self._cpu_seconds()
        if self._cpu is None:
            self._cpu = used
        elif used - self._cpu >= LEAST_CPU_SECONDS:
            self._cpu, self._worked = used, now
        self._froze = self._froze or self._frozen_seconds >= FROZEN_SECONDS

    @property
    def silent_seconds(self) -> float:
        """Age of the last beat."""
        return self._sampled - self._beaten if self._sampled > self._beaten else 0.0

    @property
    def stalled(self) -> str | None:
        """Why the engine should get no requests now, in a sentence; None while the loop makes progress."""
        return self._problem(FROZEN_SECONDS, self._longest_step)

    @property
    def dead(self) -> str | None:
        """Why the pod should be restarted, in a sentence; None while it need not."""
        return self._problem(FROZEN_DEAD_SECONDS, DEAD_AFTER_STALLS * self._longest_step)

    @property
    def _longest_step(self) -> float:
        """Seconds that a step may take."""
        return max(self._stall_seconds, STEPS_OF_PATIENCE * self._longest)

    @property
    def _frozen_seconds(self) -> float:
        return max(0.0, self._sampled - self._worked)

    def _problem(self, frozen: float, silent: float) -> str | None:
        if self._frozen_seconds >= frozen:
            return f"The engine's loop has stood still for {self._frozen_seconds:.0f} s; ask another engine."
        if self.silent_seconds >= silent:
            return f"The engine's loop has completed no step for {self.silent_seconds:.0f} s; ask another engine."
        return None


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all processes below it, from Linux's ``/proc``. Where there is none: the time of day, so that
    every process seems to work."""
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    pids = [pid]
    for each in pids:  # the loop body appends to it
        for tasks in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                pids += map(int, tasks.read_text().split())
            except OSError:  # the thread has ended
                continue
    return sum(map(_ticks, pids)) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    """User and system time, with that of children that have ended (proc_pid_stat(5), fields 14 to 17)."""
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    except OSError:  # the process has ended
        return 0


MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""glibc's malloc hands each large temporary back to the kernel and faults it in again; keeping them took 13-20 % off the CPU time
of forward passes of 256-1920 tokens (6 layers, hidden 512, float32)."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""glibc's malloc (2.35 or newer) asks for transparent huge pages, 2 MiB in place of 4 KiB, where the kernel leaves the choice
to programs (``madvise``). A step reads every weight, and a core reads memory 1.4 times as fast in such pages: 15 in place of 11
GB/s (docs/benchmarks, "Huge pages")."""

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""oneDNN, and torch's layer above it, keep compiled code and a description for each shape of a product: about 0.4 MiB together, and
1024 of each by default. Scores have another number of rows in nearly every step, so the engine of a tiny model grew by 800 MiB in
twelve scans of a catalogue. 256 hold the shapes of about 25 numbers of rows of a model with five shapes of weights, so that
generations find theirs. A shape that is missing costs 0.4 to 0.6 ms."""

IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads that wait for the next product sleep. By default libgomp lets them spin for milliseconds, on cores that gateway
and client need: beside another process, 32 streams of the demo model kept 34 % of their throughput, and with sleeping threads 78 %
(docs/benchmarks, "Threads that wait"). A bounded spin (``GOMP_SPINCOUNT=1000``) takes 15 % off the streams there, and adds 2 % to
scores."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user says how OpenMP threads wait; the first holds for every OpenMP library."""


def with_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` and what it leaves open."""
    waiting = {} if any(name in environment for name in WAITING) else IDLE_THREADS
    return MALLOC | HUGE_PAGES | PRODUCTS | waiting | dict(environment)


class _Events(asyncio.Protocol):
    """The server's end of the connection."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        """``take``: called with each message of the loop."""
        self._take = take
        self._unpacker = channel.Unpacker()

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._take(message.body)


GONE = "The engine's loop ended; try again."
DRAINING = "The engine is shutting down; send the request to another one."
LOADING = "The model is loading."


class LoopClient:
    """The server's side of one loop process. Use :meth:`start`, then :meth:`ask`; :meth:`close` ends the process."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._waiting: dict[str, asyncio.Queue[wire.Reply]] = {}
        self.ready: channel.Ready | None = None
        """None until the model is loaded, and after the loop process has ended."""
        self.stats: wire.Stats | None = None
        self.adapters: wire.Adapters | None = None
        """None until the model is loaded."""
        self._adapter_changes = 0
        self._process_name = secrets.token_hex(8)
        self._commands: dict[str, asyncio.Future[wire.Adapter | wire.Failed | None]] = {}
        """Commands for adapters that are not answered."""
        self._command_ids = itertools.count()
        self.failure: str | None = None
        """Why there is no loop process, in one line; set when it could not start or has ended."""
        self.ended = asyncio.Event()
        self.pulse: Pulse | None = None
        """None until the model is loaded, because loading and capturing have no steps."""
        self.stalled: str | None = None
        """Why the loop makes no progress, in a sentence; its requests have been failed. None while it makes progress."""
        self._draining = False
        self._nobody_waits = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._events = msgspec.msgpack.Decoder(channel.Event)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the process; returns at once, :attr:`ready` is set when the model is loaded, and :attr:`failure` if it does not
        start."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._start_process(theirs.fileno())
        except OSError as error:
            ours.close()
            self._give_up(f"The engine's loop cannot be started: {error}.")
            return
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Events(self._take), sock=ours)
        self._tasks = [asyncio.create_task(self._watch(self._process))]

    def _start_process(self, descriptor: int) -> subprocess.Popen[bytes]:
        settings = msgspec.json.encode(self.settings).decode()
        return subprocess.Popen(  # noqa: S603 - this program's own module
            [sys.executable, "-m", "yardstick_llm.engine.server.loop_process", settings, str(descriptor)],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
            env=with_defaults(os.environ),
            # Ctrl-C in a terminal interrupts no imports there. In a session of its own the loop would take processors from the
            # server, because Linux divides them between sessions first.
            process_group=0,
        )

    def _send(self, body: bytes, received: float = math.nan) -> None:
        """Send a message to the loop. ``received``: see :func:`channel.header_of`."""
        assert self._transport is not None
        self._transport.writelines([channel.header_of(body, received), body])

    @property
    def refusal(self) -> str | None:
        """Why requests are refused now, in a sentence; None while they are accepted."""
        if self._draining:
            return DRAINING
        return self.stalled if self.ready else self.failure or LOADING

    @property
    def dead(self) -> str | None:
        """Why the pod should be restarted, in a sentence; None while it need not be."""
        return self.failure or (self.pulse.dead if self.pulse else None)

    @property
    def name(self) -> str:
        """Name that clients use for the model; known before it is loaded."""
        return self.settings.name

    @property
    def adapters_headers(self) -> dict[str, str]:
        """The header with the revision of :attr:`adapters`; empty until the model is loaded."""
        return {} if self.adapters is None else {wire.ADAPTERS_HEADER: f"{self._process_name}-{self._adapter_changes}"}

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and return when all open ones have ended. After ``seconds`` the rest get a retryable failure."""
        self._draining = True
        if not self._waiting:
            return
        self._nobody_waits.clear()
        try:
            await asyncio.wait_for(self._nobody_waits.wait(), seconds)
        except TimeoutError:
            logger.warning("%d requests did not end in time", len(self._waiting))
            self._give_up("The engine is shutting down.")

    async def close(self) -> None:
        """End the process and all requests that wait for it."""
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its pipe and waits for it
                pass
        self._give_up("The engine is shutting down.")
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, header: channel.Header, body: bytes, received: float) -> AsyncGenerator[wire.Reply]:
        """Send a request, ``body`` as it is, and yield its replies up to the terminal one. Leaving early aborts the request.

        ``received``: when the whole request was there, on the monotonic clock, seconds.
        """
        if self.refusal is not None:
            yield wire.Failed(header.id, "not_ready", self.refusal, retryable=True, retry_after=1.0)
            return
        if header.id in self._waiting:
            yield wire.Failed(header.id, "invalid", "A request of this id is still running; ids must be unique.")
            return
        queue = self._waiting[header.id] = asyncio.Queue()
        open_sequences = header.sequences
        try:
            self._send(body, received)
            while open_sequences:
                reply = await queue.get()
                if isinstance(reply, wire.Delta):
                    open_sequences -= reply.finish is not None
                else:
                    open_sequences = 0
                yield reply
        finally:
            del self._waiting[header.id]
            if not self._waiting:
                self._nobody_waits.set()
            if open_sequences and self.ready is not None:
                self._send(wire.encode(wire.Abort(header.id)))

    def abort(self, message: wire.Abort) -> None:
        """Pass an abort on; the request's own stream gets its terminal reply."""
        if self.ready is not None:
            self._send(wire.encode(message))

    def client_gone(self, request_id: str) -> None:
        """End a request whose client has closed the connection."""
        if (queue := self._waiting.get(request_id)) is not None:
            queue.put_nowait(wire.Failed(request_id, "aborted", "The client closed the connection."))
            self.abort(wire.Abort(request_id))

    async def change_adapters(self, command: wire.LoadAdapter | wire.UnloadAdapter) -> wire.Adapter | wire.Failed | None:
        """Load or unload an adapter; None: it is unloaded. If the caller leaves, the command is carried out all the same."""
        if self.refusal is not None:
            return wire.Failed("", "not_ready", self.refusal, retryable=True, retry_after=1.0)
        command_id = str(next(self._command_ids))
        future: asyncio.Future[wire.Adapter | wire.Failed | None] = asyncio.get_running_loop().create_future()
        self._commands[command_id] = future
        try:
            self._send(wire.encode(channel.AdapterCommand(command_id, command)))
            return await future
        finally:
            self._commands.pop(command_id, None)

    def _take(self, body: bytes) -> None:
        """Process an event of the loop."""
        event = self._events.decode(body)
        if self.pulse is not None and not isinstance(event, channel.AdaptersChanged | channel.AdapterDone):
            self.pulse.beat()
        if isinstance(event, channel.StepDone):
            self.stats = event.stats
            for reply in event.replies:
                queue = self._waiting.get(reply.id)
                if queue is not None:
                    queue.put_nowait(reply)
        elif isinstance(event, channel.AdaptersChanged):
            self._has_adapters(event.adapters)
        elif isinstance(event, channel.AdapterDone):
            if (future := self._commands.get(event.id)) is not None and not future.done():
                future.set_result(event.result)
        elif isinstance(event, channel.Ready):
            self.ready, self.stats = event, event.stats
            self._has_adapters(event.adapters)
            assert self._process is not None
            cpu_seconds = partial(tree_cpu_seconds, self._process.pid)
            self.pulse = Pulse(cpu_seconds, stall_seconds=self.settings.stall_seconds)
            self._tasks.append(asyncio.create_task(self._feel(self.pulse)))
        elif isinstance(event, channel.StartFailed):
            self.failure = event.message

    def _has_adapters(self, adapters: wire.Adapters) -> None:
        self.adapters = adapters
        self._adapter_changes += 1

    async def _feel(self, pulse: Pulse) -> None:
        """Fail the loop's requests when it stalls. If it continues, the aborts reach it before anything else."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            pulse.sample()
            if self.stalled is None and pulse.stalled is not None:
                logger.error("%s %d requests are given up.", pulse.stalled, len(self._waiting))
                for request_id, queue in self._waiting.items():
                    queue.put_nowait(wire.Failed(request_id, "not_ready", pulse.stalled, retryable=True, retry_after=1.0))
                    self._send(wire.encode(wire.Abort(request_id)))
            elif self.stalled is not None and pulse.stalled is None:
                logger.warning("The engine's loop makes progress again.")
            self.stalled = pulse.stalled

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wait() -> None:
            process.wait()
            with suppress(RuntimeError):  # the event loop was closed before
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, name="loop process", daemon=True).start()
        await ended.wait()
        code = process.returncode
        await asyncio.sleep(0.1)  # the loop's last event may still arrive
        self._give_up(self.failure or f"The engine's loop ended with exit code {code}.")

    def _give_up(self, reason: str) -> None:
        self.ready = None
        self.failure = reason
        for request_id, queue in self._waiting.items():
            queue.put_nowait(wire.Failed(request_id, "internal", GONE, retryable=True))
        for future in self._commands.values():
            if not future.done():
                future.set_result(wire.Failed("", "internal", GONE, retryable=True))
        self.ended.set()
