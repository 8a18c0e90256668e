"""Items of one message that are cached start together; all others one by one, in what the step leaves."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import pytest

from engine import wire
from engine.loop.loop import ItemResults
from engine.loop.replies import Counters
from engine.requests.batch import Batch
from engine.requests.core import Branch, ItemBlock, ItemGroup, Request
from engine.scheduling import admission
from engine.scheduling.scheduler import Scheduler
from tests.engine.integrity import SlotContents, check
from tests.engine.test_scheduler import drain, items, make, settle, take

LENGTH = 10


def catalogue(count: int) -> list[list[int]]:
    """Items that begin with the same three tokens."""
    rng = random.Random(count)
    return [[1, 2, 3, *(rng.randrange(1 << 17) for _ in range(LENGTH - 3))] for _ in range(count)]


def warm(scheduler: Scheduler, given: list[list[int]], contents: SlotContents | None = None) -> None:
    scheduler.add(items("warm", given, [9]))
    drain(scheduler, contents=contents)


def blocks(scheduler: Scheduler) -> list[ItemBlock]:
    return [request for request in scheduler.running if isinstance(request, ItemBlock)]


def test_cached_items_start_together_before_the_others() -> None:
    scheduler, contents = make(slots=400, tokens=300), SlotContents()
    known, new = catalogue(8), catalogue(9)[:2]
    warm(scheduler, known, contents)
    group = items("a", [new[0], *known[:4], new[1], *known[4:]], [7, 8])
    scheduler.add(group)
    batch = scheduler.schedule()
    check(scheduler)
    (block,) = blocks(scheduler)
    assert [item.index for item in block.items] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert [len(segment.tokens) for segment in batch.segments] == [2] * 8 + [LENGTH - 3, 2] * 2
    assert batch.tokens == batch.load == 8 * 2 + 2 * (LENGTH - 1)
    contents.compute(batch)
    settle(scheduler, batch, None)
    check(scheduler)
    assert not scheduler.requests
    assert (group.cached_items, group.cached_tokens, group.computed_tokens) == (8, 8 * LENGTH + 2 * 3, batch.tokens)


@pytest.mark.parametrize("tokens", [12, 40])
def test_misses_evict_no_item_of_a_message_of_several_steps(tokens: int) -> None:
    """As above, with more misses before the cached items than a step has tokens."""
    scheduler, contents = make(slots=10 * LENGTH + 12, tokens=tokens), SlotContents()
    known = [[token, *range(100, 100 + LENGTH - 1)] for token in range(200)]
    warm(scheduler, known[:6], contents)
    warm(scheduler, known[6:10], contents)
    group = items("a", known[10:100] + known[:6], [7])
    scheduler.add(group)
    batch = scheduler.schedule()
    assert [item.index for block in blocks(scheduler) for item in block.items] == [*range(90, 96)]
    take(scheduler, batch, None, contents)
    drain(scheduler, contents=contents)
    assert group.cached_items == 6


def test_the_budget_cuts_a_group_and_its_rest_waits_by_rank() -> None:
    scheduler, contents = make(slots=400, tokens=9), SlotContents()
    known = catalogue(12)
    warm(scheduler, known, contents)
    group = items("a", known, [4, 5], now=1.0)
    scheduler.add(group)
    batch = scheduler.schedule()
    check(scheduler)
    assert [len(segment.tokens) for segment in batch.segments] == [2, 2, 2, 2, 1], "the fifth query is cut"
    assert (len(group.waiting), scheduler.waiting, len(scheduler.running)) == (7, 1, 2)
    take(scheduler, batch, None, contents)
    scheduler.add(urgent := items("urgent", known[:3], [6], now=1.0, priority=-1))
    batch = scheduler.schedule()
    assert [segment.request.group for segment in batch.segments] == [*[urgent] * 3, *[group] * 4], "3 + 1 + 5 tokens"
    take(scheduler, batch, None, contents)
    drain(scheduler, contents=contents)
    assert [len(row) for row in group.rows] == [1] * 12
    assert group.computed_tokens == 24


def test_blocks_leave_the_reserve() -> None:
    scheduler = make(slots=200, tokens=1000)
    known = [[token] * LENGTH for token in range(14)]
    warm(scheduler, known)
    scheduler.add(items("a", known, [7] * 5))
    batch = scheduler.schedule()
    check(scheduler)
    held = scheduler.cache.held_item_tokens + scheduler._allocator.other_item_tokens
    assert len(batch.segments) == 150 // (LENGTH + 5)
    assert held == 150, "a quarter of the slots is left to others"


def test_a_block_is_composed_as_its_items_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*, alone: bool) -> list[list[tuple[int, list[int], int]]]:
        if alone:
            monkeypatch.setattr(admission, "compose_block", lambda *_: None)
        scheduler, contents, told = make(slots=400, tokens=30), SlotContents(), []
        warm(scheduler, known, contents)
        scheduler.add(group := items("a", known, [7, 8, 9], readout=wire.Likelihood()))
        while group.left:
            batch = scheduler.schedule()
            told.append([_told(segment.branch, segment.tokens.tolist(), len(segment.context)) for segment in batch.segments])
            take(scheduler, batch, lambda: 3, contents)
            check(scheduler)
        return told

    def _told(branch: Branch | None, tokens: list[int], context: int) -> tuple[int, list[int], int]:
        assert branch is not None
        item: Any = branch.request
        return item.index, tokens, context

    known = catalogue(11)
    assert steps(alone=False) == steps(alone=True)


def test_nothing_is_left_to_the_garbage_collector() -> None:
    scheduler, contents = make(slots=400, tokens=30), SlotContents()
    warm(scheduler, catalogue(9), contents)
    gc.collect()
    gc.disable()
    try:
        scheduler.add(items("a", [*catalogue(9), *catalogue(10)], [7, 8]))
        drain(scheduler, contents=contents)
        left = [found for found in gc.get_objects() if isinstance(found, Request | Branch)]
    finally:
        gc.enable()
    assert left == []


def test_a_cached_item_costs_the_host_few_calls() -> None:
    """Python's calls for each further item of a message, from its arrival to its result."""
    scheduler = make(slots=20_000, tokens=8192)
    known = [[token] * LENGTH for token in range(400)]
    warm(scheduler, known)

    def calls(count: int) -> int:
        seen = [0]

        def note(_: object, event: str, __: object) -> None:
            seen[0] += event in ("call", "c_call")

        group = items(str(count), known[:count], [7] * 5)
        sys.setprofile(note)
        scheduler.add(group)
        batch = scheduler.schedule()
        _process(scheduler, batch, group)
        sys.setprofile(None)
        assert not scheduler.requests
        return seen[0]

    calls(10)
    assert (calls(300) - calls(100)) / 200 < 58


def _process(scheduler: Scheduler, batch: Batch, group: ItemGroup) -> None:
    rows = [(segment.request, [0.0]) for segment in batch.segments]
    ItemResults(scheduler, Counters()).take(group, rows)  # type: ignore[arg-type]
