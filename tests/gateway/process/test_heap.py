"""When Python's garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from gateway.cache.memory import MemoryCache
from gateway.catalogues.memory import MemoryCatalogues
from gateway.catalogues.record import packed
from gateway.configuration.bounds import CatalogueBounds
from gateway.metrics.telemetry import Telemetry
from gateway.process.heap import GarbageCollection
from gateway.text.pieces import GPT2, Pieces
from tests.gateway.catalogues.conftest import SPEC


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


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
    cache = MemoryCache(KEPT, 1 << 30)
    await cache.put_many({number.to_bytes(16): (float(number), 0.5) for number in range(KEPT)})
    return cache


async def pieces() -> object:
    found = Pieces(GPT2, [], lambda texts: [[len(text), 7] for text in texts])
    found.encode(" ".join(f"a{number}" for number in range(KEPT)))
    return found


async def registered_items() -> object:
    catalogues = MemoryCatalogues(CatalogueBounds(1 << 30, 1 << 30))
    await catalogues.create("a", "b", SPEC)
    state = await catalogues.state("a", "b")
    await catalogues.put("a", "b", state.epoch, [(str(number), packed([number], "")) for number in range(KEPT)], 0)
    return catalogues


@pytest.mark.parametrize("fill", [results, pieces, registered_items])
async def test_a_collection_visits_no_kept_entry(fill: Callable[[], Awaitable[object]]) -> None:
    """100,000 entries would take some 20 ms, in which no request is served."""
    gc.collect()
    before = len(gc.get_objects())
    kept = await fill()
    gc.collect()
    assert len(gc.get_objects()) - before < KEPT / 10
    del kept
