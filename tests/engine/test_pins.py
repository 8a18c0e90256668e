"""Pinned items, and the slots that items leave to others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine import wire
from engine.loop.loop import Loop
from engine.requests.batch import Batch
from tests.engine.integrity import check
from tests.engine.parity import make_model, some_tokens
from tests.engine.test_item_scores import LABELS, answer, make_loop, message
from tests.engine.test_loop import run


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("causal"), "qwen3", "causal last")


class Engine:
    """A loop with room for 100 items of 10 tokens, of which 37 may be pinned, and a clock that tests move."""

    def __init__(self, causal: Path, **settings: object) -> None:
        self.now = 100.0
        self.random = random.Random(3)
        self.loop: Loop = make_loop(causal, **({"max_total_tokens": 1000, "max_batched_tokens": 300} | settings))
        self.loop._clock = self.loop._scheduler._clock = lambda: self.now
        self._names = iter(range(10_000))

    def items(self, count: int, tokens: int = 10) -> list[list[int]]:
        return [some_tokens(self.random, tokens, tokens) for _ in range(count)]

    def score(self, items: list[list[int]], **fields: object) -> wire.Scored:
        return answer(run(self.loop, message(f"m{next(self._names)}", items, [7, 8], **fields), checked=True))

    def flood(self) -> None:
        """Score other items, more than fit, and the later half twice."""
        for _ in range(3):
            items = self.items(60)
            self.score(items)
            self.score(items)


def test_pinned_items_are_not_evicted_until_their_time_is_over(causal: Path) -> None:
    engine = Engine(causal)
    items = engine.items(20)
    found = engine.score(items, pin_seconds=60.0)
    assert (found.pinned_items, engine.loop.stats.slots_pinned, engine.loop.stats.unpinned_items) == (20, 200, 0)
    engine.flood()
    engine.flood()
    assert engine.score(items).cached_items == 20
    engine.now += 59
    assert engine.score(items[:5], pin_seconds=60.0).pinned_items == 5, "renewed"
    engine.now += 2
    engine.flood()
    assert engine.loop.stats.slots_pinned == 50
    assert engine.score(items[:5]).cached_items == 5
    engine.now += 60
    engine.flood()
    assert engine.loop.stats.slots_pinned == 0
    engine.loop._scheduler.cache.clear()
    assert engine.loop.stats.slots_free == 1000


def test_a_pin_can_be_removed(causal: Path) -> None:
    engine = Engine(causal)
    items = engine.items(10)
    engine.score(items, pin_seconds=1000.0)
    assert engine.score(items[:4], pin_seconds=0.0).pinned_items == 0
    assert engine.loop.stats.slots_pinned == 60
    assert engine.score(items).pinned_items == 0, "says nothing about pins"
    assert engine.loop.stats.slots_pinned == 60


def test_items_beyond_the_room_of_pins_are_scored_and_not_pinned(causal: Path) -> None:
    engine = Engine(causal)
    items = engine.items(60)
    found = engine.score(items, pin_seconds=60.0)
    assert len(found.rows) == 60
    assert found.pinned_items == 37, "half of the 750 slots that are not reserved"
    stats = engine.loop.stats
    assert (stats.slots_pinned, stats.unpinned_items, stats.slots_reserved) == (370, 23, 250)
    again = engine.score(items, pin_seconds=60.0)
    assert again.pinned_items == 37, "those that are pinned are renewed"


def test_salts_shared_beginnings_and_callers_that_keep_nothing(causal: Path) -> None:
    engine = Engine(causal)
    head = engine.items(1)[0]
    items = [head, head[:4], [*head, 5, 6], []]
    theirs = wire.Caller(cache_salt="theirs")
    assert engine.score(items, pin_seconds=60.0).pinned_items == 3, "an empty item has nothing to pin"
    assert engine.score(items, pin_seconds=60.0, caller=theirs).pinned_items == 3
    assert engine.score(items, pin_seconds=60.0, caller=wire.Caller(keep_prefix=False)).pinned_items == 0
    assert engine.loop.stats.slots_pinned == 2 * (10 + 4 + 12)
    assert engine.loop.stats.unpinned_items == 0
    engine.flood()
    assert engine.score(items, caller=theirs).cached_items == 3
    engine.now += 61
    engine.flood()
    check(engine.loop._scheduler)


def test_no_salt_takes_the_room_of_all_pins(causal: Path) -> None:
    """Alone it may have all of it; others take back up to equal parts, and end its oldest pins first."""
    engine = Engine(causal)
    first, others = engine.items(37), [engine.items(37) for _ in range(2)]
    assert engine.score(first, pin_seconds=60.0).pinned_items == 37
    callers = [wire.Caller(cache_salt=salt) for salt in ("b", "c")]
    pinned = [
        engine.score(items, pin_seconds=60.0, caller=caller).pinned_items for items, caller in zip(others, callers, strict=True)
    ]
    assert pinned == [18, 12], "half of 375 slots, then a third"
    engine.flood()
    check(engine.loop._scheduler)
    kept = [engine.score(first).cached_items]
    kept += [engine.score(items, caller=caller).cached_items for items, caller in zip(others, callers, strict=True)]
    assert kept == [12, 13, 12]
    assert engine.loop.stats.displaced_pins == 18 + 12
    assert engine.score(first[25:], pin_seconds=60.0).pinned_items == 12, "renewed"
    assert engine.score(first[:5], pin_seconds=60.0).pinned_items == 0, "it has its part"
    assert engine.score(others[0], pin_seconds=0.0, caller=callers[0]).pinned_items == 0
    assert engine.score(first[:5], pin_seconds=60.0).pinned_items == 5, "others leave room"
    check(engine.loop._scheduler)


def test_pins_give_way_to_a_request_that_needs_all_slots(causal: Path) -> None:
    engine = Engine(causal)
    items = engine.items(30)
    engine.score(items, pin_seconds=60.0)
    long = wire.Score("long", some_tokens(engine.random, 900, 900), [[7]], LABELS)
    assert answer(run(engine.loop, long, checked=True)).computed_tokens == 901
    assert engine.loop.stats.slots_pinned <= 100
    assert engine.score(items).cached_items <= 10


def test_a_failed_step_ends_all_pins(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots may not have been filled."""
    engine = Engine(causal)
    items = engine.items(10)
    engine.score(items, pin_seconds=60.0)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop._runner, "launch", fail)
        (failed,) = run(engine.loop, message("x", items, [7]))
    assert isinstance(failed, wire.Failed)
    assert engine.loop.stats.slots_pinned == 0
    assert engine.loop.stats.slots_free == 1000
    assert engine.score(items).cached_items == 0


@pytest.mark.parametrize("keep_prefix", [True, False])
def test_running_items_leave_slots_to_others(causal: Path, keep_prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of items that could fill all slots in a step. Another tenant's request finds its share of the slots at once."""
    engine = Engine(causal, max_batched_tokens=4000, reserved_share=0.4)
    scheduler, held = engine.loop._scheduler, []
    schedule = scheduler.schedule

    def watched() -> Batch:
        batch = schedule()
        held.append(scheduler.cache.held_item_tokens + scheduler.allocator.other_item_tokens)
        return batch

    monkeypatch.setattr(scheduler, "schedule", watched)
    engine.loop.submit(message("scan", engine.items(300), [7], caller=wire.Caller(keep_prefix=keep_prefix)))
    engine.loop.step()
    prompt = wire.Score("other", some_tokens(engine.random, 390, 390), [[7]], LABELS, caller=wire.Caller(tenant="b"))
    engine.loop.submit(prompt)
    seen = []
    while not any(reply.id == "other" for reply in seen):
        seen += engine.loop.step()
        check(scheduler)
    assert not any(reply.id == "scan" for reply in seen), "it did not wait for the scan's end"
    assert len(answer(run(engine.loop, checked=True)).rows) == 300
    assert held[0] > 590
    assert max(held) <= 600


def test_an_item_longer_than_the_share_of_items_is_scored(causal: Path) -> None:
    engine = Engine(causal, reserved_share=0.9)
    found = engine.score(engine.items(3, 300), pin_seconds=60.0)
    assert len(found.rows) == 3
    assert found.pinned_items == 0
