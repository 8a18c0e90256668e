"""Scores of many items with one query."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.integrity import SlotContents, check
from tests.engine.parity import Reference, assert_equal_rows, make_loop, make_model, readouts_of, some_tokens
from tests.engine.test_loop import run
from tests.engine.test_scheduler import drain, items, make, settle, take
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import take_items
from yardstick_llm.engine.loop.replies import Counters
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.requests.core import Branch, ItemBlock, ItemGroup, Request
from yardstick_llm.engine.scheduling.scheduler import Scheduler

KINDS = ["causal last", "causal mean", "classes"]
LABELS = wire.Labels([5, 17, 300])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", kind)


@pytest.fixture(scope="module")
def reference(checkpoint: Path, kind: str) -> Reference:
    return Reference(checkpoint, "qwen3", kind)


def message(
    name: str, items: list[list[int]], query: list[int], readout: wire.ScoreReadout = LABELS, **fields: Any
) -> wire.ScoreItems:
    ids, lengths = [token for item in items for token in item], list(map(len, items))
    return wire.ScoreItems(name, wire.pack_ids(ids), wire.pack_ids(lengths), query, readout, **fields)


def answer(replies: list[wire.Reply]) -> wire.Scored:
    (reply,) = replies
    assert isinstance(reply, wire.Scored), reply
    return reply


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_batched_tokens": 23}, marks=pytest.mark.slow),
        {"max_total_tokens": 130, "max_batched_tokens": 33, "overlap": True},
    ],
    ids=["chunks", "few slots and chunks"],
)
def test_rows_equal_transformers(checkpoint: Path, reference: Reference, kind: str, settings: dict[str, int]) -> None:
    """All readouts, cold and warm, with items that share a beginning, equal items and items of one token."""
    rng = random.Random(2)
    head = some_tokens(rng, 8, 8)
    items = [[*head, *some_tokens(rng, 1, 40)] for _ in range(6)] + [some_tokens(rng, 1, 1), head]
    items.append(items[2])
    loop = make_loop(checkpoint, **settings)
    for round in range(2):
        for number, readout in enumerate(readouts_of(kind)):
            query = some_tokens(rng, 1, 20)
            found = answer(run(loop, message(f"{round} {number}", items, query, readout), checked=True))
            assert_equal_rows(found.rows, [reference.row(item, query, readout) for item in items])
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == loop.stats.slots_total


def test_a_known_item_costs_only_the_query(causal: Path) -> None:
    rng = random.Random(3)
    items, loop = [some_tokens(rng, 30, 30) for _ in range(10)], make_loop(causal)
    cold = answer(run(loop, message("a", items, [7, 8, 9])))
    assert (cold.cached_items, cold.cached_tokens, cold.computed_tokens) == (0, 0, 10 * 33)
    warm = answer(run(loop, message("b", items, [9, 8])))
    assert (warm.cached_items, warm.cached_tokens, warm.computed_tokens) == (10, 300, 20)
    stats = loop.stats
    assert (stats.scored_items, stats.cached_items, stats.slots_items, stats.evicted_item_tokens) == (20, 10, 300, 0)
    other = answer(run(loop, message("c", [*items, items[0][:10]], [9], caller=wire.Caller(cache_salt="theirs"))))
    assert (other.cached_items, other.cached_tokens) == (1, 10), "only the short item, which begins another item of this salt"


def test_empty_items_and_no_items(causal: Path) -> None:
    loop = make_loop(causal)
    alone = answer(run(loop, wire.Score("x", [], [[7, 8]], LABELS)))
    assert answer(run(loop, message("a", [[], [5]], [7, 8]))).rows[0] == pytest.approx(alone.rows[0], abs=1e-5)
    assert answer(run(loop, message("b", [], [7]))).rows == []


def test_more_items_than_running_places(causal: Path) -> None:
    rng = random.Random(4)
    items, loop = [some_tokens(rng, 5, 5) for _ in range(40)], make_loop(causal, max_running_requests=2, max_waiting=3)
    found = answer(run(loop, message("a", items, [7])))
    assert len(found.rows) == 40
    assert loop.stats.steps == 1, "items take no running places"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"query": [1 << 20]}, "The query must be token ids"),
        ({"items": b"\0\0\0"}, "32-bit integers"),
        ({"items": wire.pack_ids([1 << 20])}, "An item has a token id"),
        ({"lengths": np.array([-1, 2], "<i4").tobytes()}, "lengths must be those of the items"),
        ({"readout": wire.Likelihood(), "lengths": wire.pack_ids([0, 1])}, "An item is empty"),
        ({"items": wire.pack_ids([1] * 999), "lengths": wire.pack_ids([999])}, "makes a prompt of 1000 tokens; 100 fit"),
    ],
)
def test_faulty_messages(causal: Path, fields: dict[str, object], problem: str) -> None:
    loop = make_loop(causal, max_total_tokens=100)
    (reply,) = run(loop, msgspec.structs.replace(message("a", [[1]], [7]), **fields))
    assert isinstance(reply, wire.Failed)
    assert reply.code == "invalid"
    assert problem in reply.message
    assert len(answer(run(loop, message("b", [[1]], [7]))).rows) == 1


def test_aborted_and_late_groups_answer_once(causal: Path) -> None:
    now = [0.0]
    rng = random.Random(5)
    items = [some_tokens(rng, 20, 20) for _ in range(10)]
    loop = make_loop(causal, max_batched_tokens=50)
    loop._clock = loop._scheduler._clock = lambda: now[0]
    loop.submit(message("late", items, [7], deadline=5.0))
    loop.submit(message("aborted", items, [8]))
    loop.step()
    now[0] = 6.0
    loop.submit(wire.Abort("aborted"))
    replies = run(loop)
    assert {(reply.id, reply.code) for reply in replies if isinstance(reply, wire.Failed)} == {
        ("late", "deadline"),
        ("aborted", "aborted"),
    }
    assert len(replies) == 2
    assert loop.idle
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == loop.stats.slots_total


def test_a_failed_step_fails_the_group_once(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    items, loop = [some_tokens(rng, 20, 20) for _ in range(10)], make_loop(causal, max_batched_tokens=50)
    loop.submit(message("a", items, [7]))
    loop.step()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(loop._runner, "launch", fail)
        (failed,) = loop.step()
    assert isinstance(failed, wire.Failed)
    assert (failed.id, failed.code) == ("a", "internal")
    assert loop.idle
    assert loop.stats.slots_free == loop.stats.slots_total, "the cache is emptied, because its slots may not have been filled"
    found = answer(run(loop, message("a", items, [7])))
    assert (len(found.rows), found.cached_items) == (10, 0)


def test_a_scan_of_cold_items_leaves_hot_ones(causal: Path) -> None:
    """100 hot items are scored five times; then 1,000 cold ones pass once, with room for 200 items."""
    rng = random.Random(7)
    loop = make_loop(causal, max_total_tokens=2000, max_batched_tokens=500)
    hot = [some_tokens(rng, 10, 10) for _ in range(100)]
    for number in range(5):
        run(loop, message(f"hot {number}", hot, [7]))
    for number in range(10):
        run(loop, message(f"cold {number}", [some_tokens(rng, 10, 10) for _ in range(100)], [7]))
    assert loop.stats.evicted_item_tokens > 8000
    assert loop.stats.slots_items <= 2000
    found = answer(run(loop, message("hot", hot, [7])))
    assert found.cached_items >= 90


@pytest.mark.slow
def test_items_leave_a_reserve_for_other_prefixes(causal: Path) -> None:
    """A conversation survives a flood of items, and items may use the slots that nothing else uses."""
    rng = random.Random(8)
    loop = make_loop(causal, max_total_tokens=2000, max_batched_tokens=500)
    prompt = some_tokens(rng, 300, 300)
    run(loop, wire.Score("chat", prompt, [[7]], LABELS))
    for number in range(10):
        items = [some_tokens(rng, 10, 10) for _ in range(100)]
        run(loop, message(f"a {number}", items, [7]))
        run(loop, message(f"b {number}", items, [8]))
    assert loop._scheduler.cache.evictable >= 1850  # hashes decide whether the last eviction takes a few tokens more
    assert answer(run(loop, wire.Score("again", prompt, [[7]], LABELS))).cached_tokens == 300


def test_a_request_that_keeps_nothing_leaves_no_items(causal: Path) -> None:
    loop = make_loop(causal)
    run(loop, message("a", [[1, 2, 3], [4, 5]], [7], caller=wire.Caller(keep_prefix=False)))
    assert loop.stats.slots_cached == 0
    assert loop.stats.slots_free == loop.stats.slots_total


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
    held = scheduler.cache.held_item_tokens + scheduler.allocator.other_item_tokens
    assert len(batch.segments) == 150 // (LENGTH + 5)
    assert held == 150, "a quarter of the slots is left to others"


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
    take_items(group, rows, scheduler, Counters())  # type: ignore[arg-type]
