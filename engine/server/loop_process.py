"""The loop process: a socket around :class:`engine.loop.loop.Loop`. :mod:`engine.server.loop_client` starts it.

Arguments: the settings as JSON, and the descriptor of the socket that requests come from and events go to. The process exits when
its standard input closes, so that it cannot outlive the server that started it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lora.registry import AdapterRegistry, LoraManager
from yardstick_llm.engine.models.source import located, tokenizer_files
from yardstick_llm.engine.server import channel
from yardstick_llm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_QUEUED = 1000
"""Lines that wait to be written."""
FLUSH_SECONDS = 1.0
"""Longest wait for the last lines when the process ends."""


class DroppingHandler(QueueHandler):
    """Queues records, and counts those for which there is no room.

    The loop never waits for whoever reads its standard error: a reader that stops would stop the engine as soon as the pipe is
    full. Lines go through the queue to a thread of their own; where it is full, they are dropped. ``logging.shutdown``, which
    Python calls at its exit, waits a second for the thread.
    """

    def __init__(self) -> None:
        self.lines = queue.Queue[logging.LogRecord](MAX_QUEUED)
        self.dropped = 0
        super().__init__(self.lines)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until every queued line is written, for ``FLUSH_SECONDS`` at most."""
        ends = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < ends:
            time.sleep(0.005)


def start_logs(stream: TextIO = sys.stderr) -> DroppingHandler:
    """Write the lines of all loggers to ``stream``, from a daemon thread. Returns the handler of the root logger."""
    writer = logging.StreamHandler(stream)
    writer.setFormatter(logging.Formatter(FORMAT))
    handler = DroppingHandler()
    QueueListener(handler.lines, writer).start()
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


GROWTH_BYTES = 256 << 20
"""Growth of the resident memory since the last time that makes it worth while: more than requests of one size need again."""
PAUSE_SECONDS = 10.0
"""Shortest time between two attempts."""

_STATM = Path("/proc/self/statm")


class Heap:
    """Trims the heap of this process; does nothing without glibc or ``/proc``. Not thread-safe.

    The variables in :mod:`engine.server.loop_client` keep freed temporaries in the heap, because faulting them in again takes
    longer than the products that use them. Requests of ever new sizes divide the heap into blocks that later ones do not fit, so it
    grows although what is allocated does not. glibc's ``malloc_trim`` returns the free pages within all arenas; later requests
    fault them in again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._malloc_trim = _malloc_trim() if _STATM.exists() else None
        self._clock = clock
        self._least = resident_bytes() if self._malloc_trim else 0
        self._tried = -PAUSE_SECONDS

    def trim(self) -> bool:
        """Return free memory if the process has grown by :data:`GROWTH_BYTES` since the last time. Call this only without work:
        it took 54 ms of processor time for 300 MiB. Return whether it was tried."""
        if self._malloc_trim is None or (before := resident_bytes()) < self._least + GROWTH_BYTES:
            return False
        began = self._clock()
        if began - self._tried < PAUSE_SECONDS:
            return False
        self._malloc_trim(0)
        self._tried = self._clock()
        self._least = resident_bytes()
        logger.info("returned %d MiB of free memory in %.1f ms", before - self._least >> 20, 1000 * (self._tried - began))
        return True


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function; None where the C library has none, as musl."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


INLINE_BYTES = 1 << 20
"""Pixels that are read at once, in about a millisecond."""
THREADS = 2

Message = wire.Score | wire.ScoreItems | wire.Generate


class _Received(NamedTuple):
    message: wire.Request
    time: float | None


class DigestChecks:
    """Messages on their way to the loop. One thread calls it.

    Threads compare the digests of images with their pixels, because a large image takes longer than a step may wait. A message
    waits here until its images are read. Messages of the same id that come in the meantime, such as its abort, wait behind it.
    """

    def __init__(self, submit: Callable[[wire.Request, float | None], None], refuse: Callable[[str, str], None]) -> None:
        """submit: takes messages whose images are right, and when they were received; refuse: takes the id of another one, and the
        problem."""
        self._submit = submit
        self._refuse = refuse
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: dict[str, tuple[list[_Received], Future[str | None]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a message waits."""
        return bool(self._waiting)

    def add(self, message: wire.Request, received: float | None = None) -> None:
        """Hand ``message`` on, at once or when its images are read. ``received``: see :meth:`engine.loop.loop.Loop.submit`."""
        if message.id in self._waiting:
            self._waiting[message.id][0].append(_Received(message, received))
        elif isinstance(message, wire.Abort) or not message.images:
            self._submit(message, received)
        elif sum(len(image.pixels) for image in message.images) <= INLINE_BYTES:
            self._hand_on(_Received(message, received), digest_problem(message.images))
        else:
            self._threads = self._threads or ThreadPoolExecutor(THREADS, "digests")
            self._waiting[message.id] = [_Received(message, received)], self._threads.submit(digest_problem, message.images)

    def settle(self) -> None:
        """Hand on the messages whose images have been read."""
        for request_id in [each for each, (_, read) in self._waiting.items() if read.done()]:
            (first, *others), read = self._waiting.pop(request_id)
            self._hand_on(first, read.result())
            for message, received in others:
                self.add(message, received)

    def _hand_on(self, read: _Received, found: str | None) -> None:
        if found is None:
            self._submit(*read)
        else:
            self._refuse(read.message.id, found)


def digest_problem(images: list[wire.Image]) -> str | None:
    """Return the problem with the digests of ``images``, as a sentence; None if there is none."""
    for place, image in enumerate(images):
        sides = image.rows, image.columns
        if not all(0 <= side < 1 << 32 for side in sides) or image.digest != wire.image_digest(*sides, image.pixels):
            return f"The digest of image {place} is not that of its pixels."
    return None


def start_adapters(
    registry: AdapterRegistry, settings: EngineSettings, server: channel.LoopEnd
) -> Callable[[channel.AdapterCommand], None]:
    """Load the watched adapters and start the thread that changes them; returns what queues a command of the server. The thread
    sends its own events, and the loop's thread answers a command for which the queue has no room."""
    manager = LoraManager(
        registry,
        lambda adapters: server.send(channel.AdaptersChanged(adapters)),
        root=None if settings.lora_root is None else Path(settings.lora_root),
        watched=None if settings.lora_directory is None else Path(settings.lora_directory),
    )
    manager.start()
    return lambda message: manager.submit(message.command, lambda result: server.send(channel.AdapterDone(message.id, result)))


COLLECT_WHEN_IDLE, COLLECT_UNDER_LOAD = 100, 1000
"""Steps since the last collection."""
WAIT_SECONDS = 0.001
"""Pause of a loop that has nothing to do until the images of a message are read."""


def main(settings_json: str, descriptor: str) -> int:
    """Serve until the parent is gone; returns the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends this process
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    server = channel.LoopEnd(int(descriptor))
    try:
        settings = located(settings)
        loop = build_loop(settings)
        if loop.structured is not None:
            loop.structured.start()
        files = tokenizer_files(Path(settings.model))
        adapters = start_adapters(loop.adapters, settings, server)
        ready = channel.Ready(loop.info, files, loop.stats, loop.adapters.description)
    except ModelError as error:
        server.send(channel.StartFailed(str(error)))
        return 1
    try:
        server.send(ready)
        _serve(loop, server, adapters)
    except (EOFError, ConnectionError):  # the server has ended
        return 0


def _serve(loop: Loop, server: channel.LoopEnd, adapters: Callable[[channel.AdapterCommand], None]) -> NoReturn:
    inbox = Inbox(loop, adapters)
    garbage = GarbageCollection()
    heap = Heap()
    while True:
        if loop.idle and not inbox.digests.busy:
            garbage.collect_after(COLLECT_WHEN_IDLE)
            while not (messages := server.receive(channel.BEAT_SECONDS)):
                server.send(channel.StepDone([], loop.stats))
                heap.trim()
            inbox.submit(messages)
        while messages := server.receive(WAIT_SECONDS if loop.idle and inbox.digests.busy else 0):
            inbox.submit(messages)
        inbox.digests.settle()
        replies = loop.step()
        server.send(channel.StepDone(replies, loop.stats))
        garbage.steps += 1
        garbage.collect_after(COLLECT_UNDER_LOAD)


class Inbox:
    """Decodes messages for the loop. The server has read their headers only, so a body may be faulty."""

    def __init__(self, loop: Loop, adapters: Callable[[channel.AdapterCommand], None]) -> None:
        """``adapters``: queues a command for adapters."""
        self._loop = loop
        self._adapters = adapters
        self._messages = msgspec.msgpack.Decoder(wire.Request | channel.AdapterCommand)
        self._headers = msgspec.msgpack.Decoder(channel.Header)
        self.digests = DigestChecks(loop.submit, loop.refuse)

    def submit(self, messages: Iterable[channel.Message]) -> None:
        """Hand messages to the loop, or a refusal that names what is wrong with the body."""
        for body, received in messages:
            try:
                message = self._messages.decode(body)
            except msgspec.DecodeError as error:
                header = self._headers.decode(body)
                kind = type(header).__name__.removesuffix("Header")
                self._loop.refuse(header.id, f"The body is not a {kind} message: {error}.")
            else:
                if isinstance(message, channel.AdapterCommand):
                    self._adapters(message)
                else:
                    self.digests.add(message, received)


class GarbageCollection:
    """Keeps Python's garbage collector off the hot path.

    Objects that exist at the start are never examined again. The others are collected when the loop has nothing to do or, under
    lasting load, after many steps. The loop's own objects form cycles (a request and its branches refer to each other), so the
    collector cannot stay off.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self.steps = 0
        """Steps since the last collection."""

    def collect_after(self, steps: int) -> None:
        """Collect if there were at least ``steps`` steps since the last collection."""
        if self.steps >= steps:
            gc.collect()
            self.steps = 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # unbuffered: sys.stdin's lock would block the interpreter's exit
    os._exit(0)


if __name__ == "__main__":
    start_logs()
    sys.exit(main(*sys.argv[1:]))
