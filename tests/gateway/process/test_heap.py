"""When Python's garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from gateway.ops.metrics import Telemetry
from gateway.process.heap import MOST_PUT_OFF, OVERDUE_SECONDS, GarbageCollection
from gateway.store.base import Space
from gateway.store.memory import MemoryStore
from gateway.text.tokenizer import GPT2, Pieces


class Heap:
    """Python's collector as the class sees it, with a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.middle_collections = 0
        self.collections = 0
        self.telemetry = Telemetry()
        monkeypatch.setattr("gateway.process.heap.gc.get_count", lambda: (0, 0, self.middle_collections))
        self.garbage = GarbageCollection(self.telemetry, collect=self._collect, clock=lambda: self.now)

    def _collect(self) -> None:
        self.collections += 1
        self.middle_collections = 0

    def collects(self) -> bool:
        before = self.collections
        self.garbage.tick()
        return self.collections > before

    def counted(self, reason: str) -> bool:
        return f'yardstick_garbage_collections_total{{reason="{reason}"}} 1.0'.encode() in b"".join(self.telemetry.exposition())


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> Heap:
    return Heap(monkeypatch)


def test_a_pause_between_requests_is_used(heap: Heap) -> None:
    heap.middle_collections = 1
    assert heap.collects()
    assert heap.counted("idle")
    assert not heap.collects(), "nothing became old since"


def test_requests_in_progress_put_a_collection_off(heap: Heap) -> None:
    heap.middle_collections = MOST_PUT_OFF - 1
    heap.telemetry.in_flight = 1
    heap.now += OVERDUE_SECONDS - 1
    assert not heap.collects()
    heap.telemetry.in_flight = 0
    assert heap.collects()


def test_many_old_objects_make_it_overdue(heap: Heap) -> None:
    heap.telemetry.in_flight = 1
    heap.middle_collections = MOST_PUT_OFF
    assert heap.collects()
    assert heap.counted("overdue")


def test_time_makes_it_overdue(heap: Heap) -> None:
    heap.telemetry.in_flight = 1
    heap.middle_collections = 1
    heap.now += OVERDUE_SECONDS
    assert heap.collects()
    heap.middle_collections = 1
    assert not heap.collects(), "the time counts from the last collection"


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


@pytest.mark.parametrize("fill", [results, pieces, registered_items])
async def test_a_collection_visits_no_kept_entry(fill: Callable[[], Awaitable[object]]) -> None:
    """100,000 entries would take some 20 ms, in which no request is served."""
    gc.collect()
    before = len(gc.get_objects())
    kept = await fill()
    gc.collect()
    assert len(gc.get_objects()) - before < KEPT / 10
    del kept
