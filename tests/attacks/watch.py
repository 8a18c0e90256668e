"""Watches a gateway process while a test attacks it: memory, the answer time of ``/livez``, and the process's own metrics."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.processes import Program

SAMPLE_SECONDS = 0.05
MIB = 1024 * 1024


class Watch:
    """A context manager that samples ``program`` from another thread. Read the results after the block."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._sample_memory), threading.Thread(target=self._probe)]
        self.idle_mib = tree_mib(program.process.pid)
        """Resident memory of the process tree before the attack."""
        self.peak_mib = self.idle_mib
        """Highest resident memory of the process tree."""
        self.slowest_livez = 0.0
        """Longest time that ``/livez`` took, in seconds; infinite where it failed."""

    @property
    def grown_mib(self) -> float:
        return self.peak_mib - self.idle_mib

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _sample_memory(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak_mib = max(self.peak_mib, tree_mib(self._program.process.pid))

    def _probe(self) -> None:
        with httpx.Client(base_url=self._program.url, timeout=60) as client:
            while not self._stop.wait(SAMPLE_SECONDS):
                began = time.monotonic()
                try:
                    client.get("/livez").raise_for_status()
                    seconds = time.monotonic() - began
                except httpx.HTTPError:
                    seconds = float("inf")
                self.slowest_livez = max(self.slowest_livez, seconds)


def tree_mib(pid: int) -> float:
    """Resident memory of a process and of all processes below it, in MiB."""
    return sum(_resident(each) for each in process_tree(pid)) / MIB


def settled_mib(pid: int, seconds: float = 1.0) -> float:
    """:func:`tree_mib` once it has not changed by a MiB for ``seconds``: a gateway forks its text workers after it is ready."""
    mib = tree_mib(pid)
    while True:
        time.sleep(seconds)
        before, mib = mib, tree_mib(pid)
        if abs(mib - before) < 1:
            return mib


def process_tree(pid: int) -> list[int]:
    """A process and all processes below it."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended meanwhile
                continue
    return found


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * 4096


def total_of(program: Program, name: str) -> float:
    """The sum of all series of a metric, over the values of its labels."""
    lines = program.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def metric_of(program: Program, name: str) -> float:
    """The value of a metric, named with its labels as in the exposition; 0 where it has none yet."""
    lines = program.client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)
