"""The scheduler without a model: random requests, a check of every slot after every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from engine import wire
from engine.kvcache.prefix_cache import SlotPool
from engine.loop.loop import ItemResults
from engine.loop.replies import Counters
from engine.requests.core import NOBODY, Branch, ItemGroup, ScoringRequest
from engine.requests.generation import GenerateRequest
from engine.scheduling.scheduler import PREFILL_SHARE, Budget, Scheduler
from tests.engine.depth import seeds
from tests.engine.integrity import SlotContents, check


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(slots: int = 256, tokens: int = 32, running: int = 8, clock: Clock | None = None, length_slots: int = 0) -> Scheduler:
    lenvm_pool = SlotPool(length_slots) if length_slots else None
    return Scheduler(SlotPool(slots), Budget(tokens, running), clock or Clock(), lenvm_pool=lenvm_pool)


def score(name: str, prefix: list[int], *branches: list[int], **extra) -> ScoringRequest:
    return ScoringRequest.of(wire.Score(name, prefix, list(branches), wire.Labels([1, 2]), **extra), 0.0)


def generate(name: str, prompt: list[int], max_tokens: int = 8, n: int = 1, **extra) -> GenerateRequest:
    return GenerateRequest.of(wire.Generate(name, prompt, wire.Sampling(max_tokens=max_tokens, n=n), **extra), 0.0)


def settle(scheduler: Scheduler, batch, draw) -> list[Branch]:
    """Give a step's results to the scheduler as the loop does."""
    done = []
    items: dict[ItemGroup, list[tuple[ScoringRequest, list[float]]]] = {}
    for segment in (*batch.segments, *batch.lenvm_segments):
        if segment.request.group is not None and segment.branch is not None and segment.completes:
            items.setdefault(segment.request.group, []).append((segment.request, [0.0]))
    for group, rows in items.items():
        ItemResults(scheduler, Counters()).take(group, rows)
    for segment in batch.segments:
        if segment.branch is None or not segment.completes or segment.request.group is not None:
            continue
        if isinstance(segment.request, GenerateRequest):
            segment.branch.tokens.extend([draw()])
            if len(segment.branch.outputs) < segment.request.message.sampling.max_tokens:
                continue
        done.append(segment.branch)
        scheduler.finish(segment.branch)
    for segment in batch.lenvm_segments:
        request = segment.request
        if isinstance(request, ScoringRequest) and request.group is None and segment.branch is not None and segment.completes:
            done.append(segment.branch)
            scheduler.finish(segment.branch)
    return done


def take(scheduler: Scheduler, batch, draw, contents: SlotContents, decided: Callable[[], bool] = lambda: False) -> None:
    """One step; ``decided``: whether a guided draw turns out to need no length model."""
    skipped = [candidate_pass for candidate_pass in batch.candidate_passes.values() if decided()]
    contents.compute(batch, skipped)
    for candidate_pass in skipped:
        scheduler.release_unused(candidate_pass)
    settle(scheduler, batch, draw)
    contents.adopt()


def drain(scheduler: Scheduler, draw=lambda: 7, contents: SlotContents | None = None, decided=lambda: False) -> None:
    contents = contents or SlotContents()
    for _ in range(5000):
        batch = scheduler.schedule()
        if batch.empty:
            assert not scheduler.requests
            return
        take(scheduler, batch, draw, contents, decided)
        check(scheduler)
    raise AssertionError("the requests never ended")


def test_long_prompts_are_computed_in_chunks_beside_decoding():
    scheduler = make(tokens=16)
    scheduler.add(generate("short", [1, 2], max_tokens=20))
    settle(scheduler, scheduler.schedule(), lambda: 5)
    scheduler.add(generate("long", list(range(40))))
    sizes = []
    for _ in range(3):
        batch = scheduler.schedule()
        sizes.append({segment.request.id: len(segment.tokens) for segment in batch.segments})
        settle(scheduler, batch, lambda: 5)
    assert sizes[:2] == [{"short": 1, "long": 15}] * 2
    assert sizes[2]["short"] == 1


def test_decoding_never_waits_for_room():
    scheduler = make(tokens=4, running=16)
    for i in range(8):
        scheduler.add(generate(f"g{i}", [i + 1, 50 + i], max_tokens=30))
    for _ in range(6):
        settle(scheduler, scheduler.schedule(), lambda: 3)
    assert len(scheduler.running) >= 4
    batch = scheduler.schedule()
    assert {segment.request.id for segment in batch.segments} >= {request.id for request in scheduler.running}


def test_neither_decoding_nor_prompts_starve():
    scheduler = make(slots=2000, tokens=16, running=64)
    for i in range(20):
        scheduler.add(generate(f"g{i}", [i], max_tokens=50))
    while len(scheduler.running) < 20:
        settle(scheduler, scheduler.schedule(), lambda: 3)
    scheduler.add(score("items", [100] * 30, [101] * 10))
    for _ in range(10):
        batch = scheduler.schedule()
        decoding = [segment.request.id for segment in batch.segments if segment.request.id != "items"]
        assert sorted(decoding) == sorted(f"g{i}" for i in range(20))  # each sequence its token, though 20 are over the budget
        assert batch.tokens == 20 + 16 * PREFILL_SHARE  # and the items their share
        settle(scheduler, batch, lambda: 3)
    assert scheduler.get("items") is None


def test_what_was_taken_is_computed_again():
    scheduler = make(slots=40, tokens=64)
    first, second = generate("a", [1] * 10, max_tokens=25), generate("b", [2] * 10, max_tokens=25)
    scheduler.add(first)
    scheduler.add(second)
    drawn = itertools.count(100)
    drain(scheduler, lambda: next(drawn))
    assert second.computed_tokens > first.computed_tokens == 34


def test_priority_then_arrival():
    scheduler = make(tokens=1, running=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        scheduler.add(score(name, [], [1], priority=priority))
    order = []
    while scheduler.requests:
        batch = scheduler.schedule()
        order.append(batch.segments[0].request.id)
        settle(scheduler, batch, None)
    assert order == ["first", "second", "late"]


def computed(batch) -> dict[str, int]:
    """Tokens of a step by request."""
    found: dict[str, int] = {}
    for segment in batch.segments:
        found[segment.request.id] = found.get(segment.request.id, 0) + len(segment.tokens)
    return found


def test_urgent_requests_overtake_running_ones_in_the_next_step():
    """Scores, items and prompts with a lower rank than those that fill each step."""
    scheduler = make(slots=4096, tokens=32)
    scheduler.add(score("large", [7], *([place + 10] * 3 for place in range(100))))
    scheduler.add(score("equal", [8], [1]))
    for _ in range(3):
        batch = scheduler.schedule()
        assert list(computed(batch)) == ["large"]
        settle(scheduler, batch, None)
        check(scheduler)
    scheduler.add(score("urgent", [9], *([place] * 3 for place in range(1, 13)), priority=-10))
    scheduler.add(generate("text", [5] * 6, max_tokens=1, priority=-9))
    settle(scheduler, batch := scheduler.schedule(), None)
    assert computed(batch) == {"urgent": 32}
    settle(scheduler, batch := scheduler.schedule(), lambda: 100)
    assert (list(computed(batch)), computed(batch)["urgent"], computed(batch)["text"]) == (["urgent", "text", "large"], 5, 6)
    check(scheduler)
    assert list(computed(scheduler.schedule())) == ["large"], "as before: in order of arrival"


def test_running_requests_of_a_lower_rank_come_first():
    """A request that was admitted late, because there was no place, is computed before those that were admitted earlier."""
    scheduler = make(slots=4096, tokens=32, running=2)
    scheduler.add(score("large", [7], *([place + 10] * 3 for place in range(100)), priority=3))
    settle(scheduler, scheduler.schedule(), None)
    scheduler.add(score("middle", [9], *([place + 10] * 3 for place in range(40))))
    steps = []
    while scheduler.get("middle") is not None:
        batch = scheduler.schedule()
        steps.append(computed(batch))
        settle(scheduler, batch, None)
        check(scheduler)
    assert [list(step) for step in steps] == [["middle"]] * 3 + [["middle", "large"]]


def test_late_work_is_dropped_before_it_is_computed():
    clock = Clock()
    scheduler = make(tokens=8, clock=clock)
    written = generate("written", [8, 9], deadline=1.0)
    computed, part, none = (score(str(first), [first, 6, 7], [4], deadline=1.0) for first in (1, 2, 3))
    for request in (written, computed, part, none):
        scheduler.add(request)
    assert {segment.request.id for segment in scheduler.schedule().segments} == {"written", "1", "2"}
    clock.now = 2.0
    assert scheduler.expire() == [part, none]
    assert scheduler.requests == [written, computed]


def test_a_deadline_is_not_that_of_a_later_request_with_the_same_id():
    clock = Clock()
    scheduler = make(clock=clock)
    scheduler.add(score("same", [5, 6, 7], [4], deadline=1.0))
    settle(scheduler, scheduler.schedule(), None)
    later = score("same", [5, 6, 7], [4], deadline=5.0)
    scheduler.add(later)
    clock.now = 2.0
    assert scheduler.expire() == []
    clock.now = 5.0
    assert scheduler.expire() == [later]


def items(name: str, given: list[list[int]], query: list[int], now: float = 0.0, **extra) -> ItemGroup:
    ids, lengths = wire.pack_ids([token for item in given for token in item]), wire.pack_ids([len(item) for item in given])
    return ItemGroup.of(wire.ScoreItems(name, ids, lengths, query, extra.pop("readout", wire.Labels([1])), **extra), now)


def random_items(rng: random.Random, name: str, *, guided: bool, caller: wire.Caller, now: float) -> ItemGroup:
    """Items of which most occur in other messages too; some begin with others."""
    catalogue = random.Random(7)
    known = [[catalogue.randrange(3) for _ in range(catalogue.randint(1, 12))] for _ in range(20)]
    given = [rng.choice(known) for _ in range(rng.randint(1, 12))]
    readout = wire.LengthValue() if guided and rng.random() < 0.3 else rng.choice([wire.Labels([1]), wire.Likelihood()])
    caller = msgspec.structs.replace(caller, keep_prefix=rng.random() < 0.9)
    return items(name, given, [rng.randrange(3) for _ in range(rng.randint(1, 6))], now, readout=readout, caller=caller)


def random_request(rng: random.Random, name: str, *, guided: bool = False, caller: wire.Caller = NOBODY, now: float = 0.0):
    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(low, high))]  # a tiny alphabet: many common prefixes

    if rng.random() < 0.3:
        return random_items(rng, name, guided=guided, caller=caller, now=now)
    kind = rng.random()
    if kind < 0.5:
        branches, priority = [some(1, 20) for _ in range(rng.randint(1, 12))], rng.choice([0, 0, 1])
        return ScoringRequest.of(wire.Score(name, some(0, 30), branches, wire.Labels([1, 2]), priority, caller=caller), now)
    if guided and kind < 0.6:
        return ScoringRequest.of(
            wire.Score(name, some(0, 30), [some(1, 20) for _ in range(rng.randint(1, 6))], wire.LengthValue(), caller=caller), now
        )
    extra: dict = {"caller": caller}
    if kind < 0.65:
        extra["prompt_logprobs"] = 0
    if guided and rng.random() < 0.7:
        extra["length_guidance"] = wire.LengthGuidance(scale=1.0, top_k=rng.choice([1, 2, 5]))
    return generate(name, some(1, 40), max_tokens=rng.randint(0, 15), n=rng.choice([1, 1, 3]), **extra)


@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
@pytest.mark.parametrize("seed", seeds(quick=1, slow=6, deep=100))
def test_random_requests_end_and_every_slot_has_one_owner(seed: int, guided: bool):
    rng = random.Random(seed)
    decided = rng.choice([0.0, 0.5, 0.9])
    scheduler = make(
        slots=rng.choice([64, 90, 400]),
        tokens=rng.choice([5, 16, 64]),
        running=rng.choice([2, 8]),
        length_slots=rng.choice([64, 90, 400]) if guided else 0,
    )
    contents = SlotContents()
    names = itertools.count()
    for step in range(400):
        while step < 250 and rng.random() < 0.4:
            scheduler.add(random_request(rng, f"r{next(names)}", guided=guided))
        if scheduler.requests and rng.random() < 0.05:
            scheduler.remove(rng.choice(scheduler.requests))
        batch = scheduler.schedule()
        assert batch.tokens == sum(len(segment.tokens) for segment in batch.segments)
        if rng.random() < 0.02:
            scheduler.fail(batch)
        else:
            take(scheduler, batch, lambda: rng.randrange(3), contents, lambda: rng.random() < decided)
        check(scheduler)
    drain(scheduler, lambda: rng.randrange(3), contents, lambda: rng.random() < decided)
    for kv_pool in scheduler.kv_pools:
        kv_pool.cache.clear()
        assert kv_pool.pool.available == kv_pool.pool.size


def test_tree_is_exact_under_splits():
    scheduler = make(slots=64)
    cache, pool = scheduler.cache, scheduler.pool

    def enter(tokens: list[int]):
        array = np.array(tokens, np.int32)
        node, known = cache.match_prefix(cache.root, array)
        if len(known) < len(array):
            node = cache.insert(node, array[len(known) :], pool.allocate(len(array) - len(known)))
        return node, known.tolist()

    long, _ = enter([1, 2, 3, 4, 5])
    short, known = enter([1, 2, 3])
    assert len(known) == 3
    fork, known = enter([1, 2, 9])
    assert len(known) == 2
    for node in (long, short, fork):
        cache.release(node)
    assert cache.evictable == 6
    assert cache.evict(1) == 2  # the least recently used leaf is 4, 5
    assert sorted(len(node.tokens) for node in cache.nodes()) == [1, 1, 2]
    cache.clear()
    assert pool.available == pool.size
