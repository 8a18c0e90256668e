"""Creates the requests of a run ahead of the process that sends them. ``python -m yardstick_llm.loadgen.maker``

It is a separate process, because creating a body takes as long as sending it. It reads one :class:`Order` from standard input and
writes frames to standard output, until the schedule ends or the reader closes the pipe.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from yardstick_llm.loadgen.arrivals import Closed, Share, schedule
from yardstick_llm.loadgen.content import Content
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.scenario import Scenario

_FRAME = struct.Struct("<dIIII")
"""Due time, index of the workload, number of items, and the lengths of body and later turns that follow."""
BUFFER_BYTES = 128 << 20
BUFFER_REQUESTS = 10_000
"""Bounds on the requests that wait to be sent; creation continues as they are sent. A run starts once one bound is reached."""
_NICENESS = 5
"""If the processes share one core, sending has priority."""


class Order(msgspec.Struct, frozen=True):
    """The part of a run to create."""

    scenario: Scenario
    share: Share


@dataclass(frozen=True, slots=True)
class Due:
    """A request and its due time in seconds from the start; 0 in a closed loop."""

    scheduled: float
    workload: int
    items: int
    body: bytes
    later: bytes = b""
    """JSON list of the user's further messages; empty unless the request begins a conversation of several turns."""


def make(order: Order) -> Iterator[Due]:
    """Yield all requests of this worker. Raises :class:`LoadError` if a trace cannot be read."""
    scenario = order.scenario
    sources = [
        workload.asks(Content(scenario.seed, order.share, place), scenario.target.model)
        for place, workload in enumerate(scenario.workloads)
    ]
    weights = [workload.weight for workload in scenario.workloads]
    rng = order.share.seed(scenario.seed, "mix")
    for scheduled in _times(order):
        place = rng.choices(range(len(sources)), weights)[0]
        ask = next(sources[place])
        later = b"[%b]" % b",".join(ask.later) if ask.later else b""
        yield Due(scheduled, place, ask.items, ask.body, later)


def _times(order: Order) -> Iterator[float]:
    scenario = order.scenario
    if isinstance(scenario.arrivals, Closed):
        return iter(lambda: 0.0, None)
    return schedule(scenario.arrivals, scenario.duration_s, scenario.seed, order.share)


class Maker:
    """The reader's side of the creating process: requests in order, with a bounded number of bytes ahead."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ready: deque[Due] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._enough = asyncio.Event()
        self._room = asyncio.Event()

    async def __aenter__(self) -> Maker:
        """Start the process and wait until the run can begin. Raises :class:`LoadError` with its reason if it fails."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "yardstick_llm.loadgen.maker",
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=1 << 20,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._order))
        self._process.stdin.close()
        self._reading = asyncio.create_task(self._read())
        try:
            await self._enough.wait()
            if not self._ready:
                await self._reading
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the process, even if requests are left."""
        self._reading.cancel()
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(asyncio.CancelledError, LoadError):
            await self._reading
        await self._process.communicate()  # reads the pipes to their ends; otherwise their transports would stay open

    async def next(self) -> Due | None:
        """Return the next request; None after the last. Waits only if creation falls behind sending. Raises :class:`LoadError`."""
        while not self._ready:
            if self._reading.done():
                self._reading.result()
                return None
            self._news.clear()
            await self._news.wait()
        due = self._ready.popleft()
        self._bytes -= len(due.body) + len(due.later)
        if not self._full:
            self._room.set()
        return due

    @property
    def _full(self) -> bool:
        return self._bytes >= BUFFER_BYTES or len(self._ready) >= BUFFER_REQUESTS

    async def _read(self) -> None:
        try:
            await self._read_frames()
        finally:
            self._enough.set()
            asyncio.get_running_loop().call_soon(self._news.set)  # runs after this task's current step

    async def _read_frames(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            while True:
                scheduled, workload, items, *lengths = _FRAME.unpack(await self._process.stdout.readexactly(_FRAME.size))
                body, later = [await self._process.stdout.readexactly(length) for length in lengths]
                self._ready.append(Due(scheduled, workload, items, body, later))
                self._bytes += len(body) + len(later)
                self._news.set()
                if self._full:
                    self._enough.set()
                    self._room.clear()
                    await self._room.wait()
        except asyncio.IncompleteReadError:
            said = (await self._process.stderr.read()).decode(errors="replace").strip()
            if await self._process.wait():
                raise LoadError(said.rpartition("\n")[2] or "the process that makes requests was killed") from None


def main() -> None:
    """Fill the order on standard input."""
    os.nice(_NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        for due in make(order):
            sys.stdout.buffer.write(_FRAME.pack(due.scheduled, due.workload, due.items, len(due.body), len(due.later)))
            sys.stdout.buffer.write(due.body + due.later)
        sys.stdout.buffer.flush()
    except LoadError as error:
        sys.exit(str(error))
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the reader has closed the pipe; a flush at exit would fail again


if __name__ == "__main__":
    main()
