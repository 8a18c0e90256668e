"""Processor time of the host for each step of the engine, without models and kernels: ``python -m benchmarks host``.

The models cost nothing (:mod:`benchmarks.engine.null_engine`); messages are encoded, sent, decoded, checked, scheduled, laid out
and answered as in service. Counted is the processor time of the loop's thread. Cases:

- *score*: steps of 8,192 tokens, 43 items of 180 tokens; ten items share a query of 120 tokens.
- *catalogue*: steps of 8,192 tokens, 409 cached items of 180 tokens, each with a query of 20 tokens.
- *decode*: 256 rows of 300 to 450 tokens that draw at temperature 1.
- *guided*: the same with length guidance.
- *structured*: 64 rows with a grammar. The time of the threads that compute masks is reported separately.

Times are scaled to a clock of 2.5 GHz: the clock is measured beside each case, with a loop that takes one cycle a round.
``--against CHECKOUT`` alternates with the engine of another checkout and tells the median of the ratios.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import mmap
import os
import platform
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from benchmarks.engine.host_cases import CASES, Feed
from benchmarks.engine.machine import describe
from engine import wire
from engine.loop import Loop
from engine.serving import channel, loop_process

GIGAHERTZ = 2.5
WARM_STEPS = 20
LIMITS = {"score": 4.0, "catalogue": 12.0, "decode": 5.0, "guided": 8.0}
"""Milliseconds of a step."""
COUNT_DOWN = bytes.fromhex("48ffcf 75fb c3")
"""x86-64: ``dec rdi; jnz -5; ret``, one cycle a round on every processor of the last ten years."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""The variables that the engine's server sets for the loop process."""
HERE = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks host", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all unless some are named")
    parser.add_argument("--steps", type=int, default=100, help="measured steps of a case")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes, and end")
    options = parser.parse_args(arguments)
    cases = options.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; cases are {', '.join(CASES)}")
    if options.profile:
        for case in cases:
            measure(case, options.steps, cProfile.Profile(time.thread_time))
        return 0
    here: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    there: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            here[case].append(in_process(HERE, case, options.steps))
            if options.against is not None:
                there[case].append(in_process(options.against.resolve(), case, options.steps))
    result: dict[str, Any] = {"benchmark": "host", "steps": options.steps, "machine": describe()}
    for case in cases:
        result[case] = summary(here[case], there[case], LIMITS.get(case))
        print(f"{case:<10} {result[case]}")
    print(json.dumps(result))
    return 0


def summary(here: Sequence[dict[str, float]], there: Sequence[dict[str, float]], limit: float | None) -> dict[str, Any]:
    """Medians over rounds, and the median of the ratios of a pair."""
    told: dict[str, Any] = {name: round(statistics.median(one[name] for one in here), 3) for name in here[0]}
    told["limit_ms"] = limit
    if there:
        told["against_ms"] = round(statistics.median(one["ms"] for one in there), 3)
        told["ratio"] = round(statistics.median(one["ms"] / other["ms"] for one, other in zip(here, there, strict=True)), 3)
    return told


def in_process(checkout: Path, case: str, steps: int) -> dict[str, float]:
    """Measure a case in a process with the engine of ``checkout``."""
    code = (
        "import json, sys, benchmarks; sys.path.insert(0, sys.argv[1]); from benchmarks.engine.host import measure; "
        "print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", code, str(checkout), case, str(steps)]
    done = subprocess.run(  # noqa: S603
        command, cwd=HERE, env=MALLOC | os.environ, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(case: str, steps: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Time ``steps`` steps of a case in this process."""
    torch.set_num_threads(1)
    loop, feed = CASES[case]()
    hertz = [clock_rate()]
    with zmq.Context() as context:
        meter = Meter(context, loop, feed, steps, profile)
        meter.serve()
    hertz.append(clock_rate())
    rate = statistics.mean(hertz)
    scale = rate / (GIGAHERTZ * 1e9)
    if profile is not None:
        print(f"\n{case}: {meter.seconds / steps * 1e3:.2f} ms a step under the profiler")
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return {
        "ms": meter.seconds / steps * 1e3 * scale,
        "other_threads_ms": meter.other_seconds / steps * 1e3 * scale,
        "unscaled_ms": meter.seconds / steps * 1e3,
        "gigahertz": rate / 1e9,
        "tokens": meter.tokens / steps,
    }


class Stop(Exception):
    """All steps are measured."""


class Meter:
    """The other end of the loop process's sockets. It feeds requests between two steps, while the clock stands still."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], loop: Loop, feed: Feed, steps: int, profile: cProfile.Profile | None
    ) -> None:
        self._loop, self._feed, self._steps, self._profile = loop, feed, steps, profile
        self._requests, self._events, self._sink, self._inbox = (
            context.socket(kind) for kind in (zmq.PUSH, zmq.PUSH, zmq.PULL, zmq.PULL)
        )
        for bound, connected, name in ((self._inbox, self._requests, "requests"), (self._sink, self._events, "events")):
            bound.set_hwm(0)
            connected.set_hwm(0)
            bound.bind(f"inproc://{name}")
            connected.connect(f"inproc://{name}")
        self._decoder = msgspec.msgpack.Decoder(channel.Event)
        self._done = -WARM_STEPS
        """Measured steps; below 0 while steps are not yet as they are to be."""
        self._computed = 0
        self._started = self._started_all = 0.0
        self.seconds = self.other_seconds = 0.0
        self.tokens = 0

    def serve(self) -> None:
        """Run the loop process's loop."""
        self._submit(self._feed.first())
        try:
            loop_process._serve(self._loop, self._inbox, self)  # type: ignore[arg-type]  # it calls `send` only
        except Stop:
            pass
        finally:
            for socket in (self._requests, self._events, self._sink, self._inbox):
                socket.close(0)
            self._loop.close()

    def send(self, event: bytes) -> None:
        """Take the event of one step."""
        self._events.send(event)
        if self._profile is not None:
            self._profile.disable()
        self._count()
        if self._done == self._steps:
            raise Stop
        done = self._decoder.decode(self._sink.recv())
        assert isinstance(done, channel.StepDone)
        self._submit(self._feed.next(done.replies))
        if self._profile is not None and self._done >= 0:
            self._profile.enable()
        self._started, self._started_all = time.thread_time(), time.process_time()

    def _count(self) -> None:
        spent, spent_all = time.thread_time() - self._started, time.process_time() - self._started_all
        computed = self._loop.stats.computed_tokens
        if self._done >= 0:
            self.seconds += spent
            self.other_seconds += spent_all - spent
            self.tokens += computed - self._computed
        self._computed = computed
        self._done += self._feed.warm

    def _submit(self, requests: Sequence[wire.Request]) -> None:
        for request in requests:
            self._requests.send(wire.encode(request))


def clock_rate() -> float:
    """Cycles a second of this processor now: of x86-64 from a loop of known length, of others as Linux tells."""
    if platform.machine() != "x86_64":
        info = Path("/proc/cpuinfo").read_text().splitlines()
        return next((1e6 * float(line.partition(":")[2]) for line in info if line.startswith("cpu MHz")), GIGAHERTZ * 1e9)
    with mmap.mmap(-1, len(COUNT_DOWN), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as memory:
        memory.write(COUNT_DOWN)
        place = ctypes.c_char.from_buffer(memory)
        count_down = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(place))
        rates = []
        for _ in range(5):
            began = time.thread_time()
            count_down(20_000_000)
            rates.append(20_000_000 / (time.thread_time() - began))
        del place
    return max(rates)
