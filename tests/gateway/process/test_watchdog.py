"""The measure of an event loop that is kept from serving what is due."""

from __future__ import annotations

import asyncio
import time

import pytest

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import BUSY_SECONDS, CALM_SECONDS, IDLE_SECONDS, Watchdog


def longest(telemetry: Telemetry) -> float:
    lines = b"".join(telemetry.exposition()).decode().splitlines()
    line = next(line for line in lines if line.startswith("yardstick_event_loop_blocked_max"))
    return float(line.split()[-1])


def spin(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.alone
@pytest.mark.parametrize(
    ("seconds", "work", "error"), [(0.02, 0.004, BUSY_SECONDS), (0.1, 0.004, BUSY_SECONDS), (0.1, 0, CALM_SECONDS)]
)
async def test_a_callback_that_runs_too_long_is_measured(seconds: float, work: float, error: float) -> None:
    """A loop with work is measured more exactly than a calm one."""
    telemetry = Telemetry()
    telemetry.in_flight += 1
    watchdog = Watchdog(telemetry)
    watchdog.start()
    for _ in range(30):
        spin(work)
        await asyncio.sleep(0.001)
    spin(seconds)
    await asyncio.sleep(CALM_SECONDS)
    watchdog.stop()
    assert seconds - 2 * error < longest(telemetry) < seconds + 2 * error


async def test_time_in_which_others_had_the_processor_does_not_count() -> None:
    telemetry = Telemetry()
    watchdog = Watchdog(telemetry)
    watchdog.start()
    await asyncio.sleep(0.02)
    time.sleep(2 * IDLE_SECONDS)  # noqa: ASYNC251 - stands for a process that is not scheduled
    await asyncio.sleep(0.1)
    watchdog.stop()
    assert longest(telemetry) < 0.01
