"""The measure of an event loop that is kept from serving what is due, and when Python's garbage is collected."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import BUSY_SECONDS, CALM_SECONDS, IDLE_SECONDS, GarbageCollection, Watchdog
from yardstick_llm.gateway.store.base import Space
from yardstick_llm.gateway.store.memory import MemoryStore
from yardstick_llm.gateway.text.tokenizer import GPT2, Pieces, by_expression


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


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
@pytest.mark.usefixtures("thresholds")
def test_old_cycles_wait_for_a_tick_and_no_longer() -> None:
    telemetry = Telemetry()
    telemetry.in_flight = 1
    garbage = GarbageCollection(telemetry)
    garbage.start()
    cycle = Cycle()
    gc.collect(1)  # makes it old
    gone = weakref.ref(cycle)
    del cycle
    kept: list[list[int]] = []
    while gc.get_count()[2] < 20:  # Python's default would collect twice meanwhile
        kept += ([] for _ in range(1000))
    garbage.tick()
    assert gone() is not None
    telemetry.in_flight = 0
    garbage.tick()
    assert gone() is None


KEPT = 2000


async def results() -> object:
    store = MemoryStore(KEPT, 1 << 30)
    await store.cache({number.to_bytes(16): bytes(8) for number in range(KEPT)})
    return store


async def pieces() -> object:
    found = Pieces(by_expression(GPT2), [], lambda texts: [[len(text), 7] for text in texts])
    found.encode(" ".join(f"a{number}" for number in range(KEPT)))
    return found


async def registered_items() -> object:
    store, space = MemoryStore(), Space(name="s", bytes=1 << 30, entries=1 << 30, entry_bytes=0)
    await store.put(space, "owner", [(str(number), number.to_bytes(16)) for number in range(KEPT)])
    return store


@pytest.mark.slow
@pytest.mark.parametrize("fill", [results, pieces, registered_items])
async def test_a_collection_visits_no_kept_entry(fill: Callable[[], Awaitable[object]]) -> None:
    """100,000 entries would take some 20 ms, in which no request is served."""
    gc.collect()
    gc.freeze()
    before = len(gc.get_objects())
    kept = await fill()
    gc.collect()
    assert len(gc.get_objects()) - before < KEPT / 10
    del kept
