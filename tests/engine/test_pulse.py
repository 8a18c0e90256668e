"""A loop that computes for long, one that stands still, and a server that was stopped itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.processes import wait_until
from yardstick_llm.engine.server.loop_client import SAMPLE_SECONDS, Pulse, tree_cpu_seconds


@dataclass
class Loop:
    """A loop's process, its CPU time, and the clock."""

    now: float = 1000.0
    cpu: float = 5.0
    working: float = 0.0
    """CPU seconds used in a second."""

    def __post_init__(self) -> None:
        self.pulse = Pulse(lambda: self.cpu, stall_seconds=10, clock=lambda: self.now)

    def live(self, seconds: float) -> None:
        """Time passes, and samples are taken."""
        for _ in range(round(seconds / SAMPLE_SECONDS)):
            self.now += SAMPLE_SECONDS
            self.cpu += self.working * SAMPLE_SECONDS
            self.pulse.sample()


def test_a_loop_that_stands_still() -> None:
    loop = Loop()
    loop.pulse.beat()
    loop.live(1.75)
    assert loop.pulse.stalled is None
    loop.live(0.25)
    assert loop.pulse.stalled == "The engine's loop has stood still for 2 s; ask another engine."
    assert loop.pulse.dead is None
    loop.live(28)
    assert loop.pulse.dead
    loop.pulse.beat()
    assert (loop.pulse.stalled, loop.pulse.dead, loop.pulse.silent_seconds) == (None, None, 0)


def test_a_long_step_is_no_stall() -> None:
    loop = Loop(working=0.9)
    loop.live(9.75)
    assert loop.pulse.stalled is None
    assert loop.pulse.silent_seconds == 9.75
    loop.live(0.25)
    assert loop.pulse.stalled == "The engine's loop has completed no step for 10 s; ask another engine."
    loop.live(19)
    assert loop.pulse.dead is None
    loop.live(1)
    assert loop.pulse.dead


def test_after_a_long_step_others_may_be_long() -> None:
    loop = Loop(working=0.9)
    loop.live(20)
    loop.pulse.beat()
    loop.live(79)
    assert loop.pulse.stalled is None
    loop.live(1)
    assert loop.pulse.stalled


def test_time_that_it_stood_still_is_no_long_step() -> None:
    loop = Loop()
    loop.live(600)
    loop.pulse.beat()
    loop.working = 0.9
    loop.live(10)
    assert loop.pulse.stalled


def test_the_idle_threads_of_libraries_are_no_work() -> None:
    loop = Loop(working=0.02)
    loop.live(2)
    assert loop.pulse.stalled


def test_a_step_that_stops_in_its_middle() -> None:
    loop = Loop(working=1)
    loop.live(5)
    assert loop.pulse.stalled is None
    loop.working = 0
    loop.live(2)
    assert loop.pulse.stalled


def test_a_server_that_was_stopped_blames_nobody() -> None:
    loop = Loop()
    loop.pulse.beat()
    loop.live(1)
    loop.now += 3600
    loop.pulse.sample()
    assert loop.pulse.stalled is None
    loop.live(0.5)
    assert loop.pulse.stalled is None
    loop.live(0.5)
    assert loop.pulse.stalled, "what had passed before counts"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_time_is_that_of_all_processes_below() -> None:
    spin = "import time\nwhile True: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        wait_until(lambda: tree_cpu_seconds(process.pid) > 0.3)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        before = tree_cpu_seconds(process.pid)
        time.sleep(0.3)
        assert tree_cpu_seconds(process.pid) == before
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
