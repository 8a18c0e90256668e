"""When Python's garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import GarbageCollection
from yardstick_llm.gateway.store.base import Space
from yardstick_llm.gateway.store.memory import MemoryStore
from yardstick_llm.gateway.text.tokenizer import GPT2, Pieces


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
    found = Pieces(GPT2, [], lambda texts: [[len(text), 7] for text in texts])
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
