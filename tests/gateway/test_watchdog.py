"""The measure of an event loop that is kept from serving what is due."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.telemetry import Telemetry
from gateway.watchdog import BUSY_SECONDS, IDLE_SECONDS, Watchdog


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
@pytest.mark.parametrize("seconds", [0.02, 0.1])
async def test_a_callback_that_runs_too_long_is_measured(seconds: float) -> None:
    telemetry = Telemetry()
    telemetry.in_flight += 1
    watchdog = Watchdog(telemetry)
    watchdog.start()
    await asyncio.sleep(0.02)
    spin(seconds)
    await asyncio.sleep(0.02)
    watchdog.stop()
    assert seconds - 2 * BUSY_SECONDS < longest(telemetry) < seconds + 2 * BUSY_SECONDS


async def test_time_in_which_others_had_the_processor_does_not_count() -> None:
    telemetry = Telemetry()
    watchdog = Watchdog(telemetry)
    watchdog.start()
    await asyncio.sleep(0.02)
    time.sleep(2 * IDLE_SECONDS)  # noqa: ASYNC251 - stands for a process that is not scheduled
    await asyncio.sleep(0.1)
    watchdog.stop()
    assert longest(telemetry) < 0.01
