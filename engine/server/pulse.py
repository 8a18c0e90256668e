"""Detects a loop process that makes no progress. :class:`engine.server.loop_client.LoopClient` owns it, in the HTTP process.

The loop sends a beat after every step and, without work, every :data:`engine.server.channel.BEAT_SECONDS`. A step sends no beat
while it runs, and on a CPU it may take minutes, so the CPU time of the loop process tells a long step from a process that hangs. A
process that uses CPU time without ever completing a step is stalled as well, after a longer time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from engine.server.channel import BEAT_SECONDS

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
    """Times since the last progress. The clock does not run while this process itself stands still."""

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
