"""The scheduler, the turns of adapters, and the estimate of waiting time."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.engine.integrity import SlotContents, check
from tests.engine.tenants import Clock
from yardstick_llm.engine import wire
from yardstick_llm.engine.kvcache.prefix_cache import SlotPool
from yardstick_llm.engine.loop.loop import take_items
from yardstick_llm.engine.loop.replies import Counters
from yardstick_llm.engine.requests.core import NOBODY, Branch, ItemGroup, ScoringRequest
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.scheduling.allocation import TURN, AdapterTurns
from yardstick_llm.engine.scheduling.scheduler import PREFILL_SHARE, Budget, Scheduler


def make(
    slots: int = 256,
    tokens: int = 32,
    running: int = 8,
    clock: Clock | None = None,
    length_slots: int = 0,
    *,
    forecasts: bool = False,
) -> Scheduler:
    lenvm_pool = SlotPool(length_slots) if length_slots else None
    return Scheduler(SlotPool(slots), Budget(tokens, running), clock or Clock(), lenvm_pool=lenvm_pool, forecasts=forecasts)


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
        take_items(group, rows, scheduler, Counters())
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
        if not isinstance(request, ScoringRequest) or segment.branch is None or not segment.completes:
            continue
        if request.forecasts is not None:
            scheduler.take_forecast(request, 10.0, request.size % 5)
        elif request.group is None:
            done.append(segment.branch)
            scheduler.finish(segment.branch)
    return done


def take(scheduler: Scheduler, batch, draw, contents: SlotContents, decided: Callable[[], bool] = lambda: False) -> None:
    """One step; ``decided``: whether a guided draw turns out to need no length model."""
    skipped = [candidate_pass for candidate_pass in batch.candidate_passes.values() if decided()]
    contents.compute(batch, skipped)
    for candidate_pass in skipped:
        scheduler.allocator.release_unused(candidate_pass)
    settle(scheduler, batch, draw)
    contents.adopt()


def drain(scheduler: Scheduler, contents: SlotContents | None = None) -> None:
    contents = contents or SlotContents()
    for _ in range(5000):
        batch = scheduler.schedule()
        if batch.empty:
            assert not scheduler.requests
            return
        take(scheduler, batch, lambda: 7, contents)
        check(scheduler)
    raise AssertionError("the requests never ended")


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


def request(digest: str | None) -> Any:
    return SimpleNamespace(adapter=None if digest is None else SimpleNamespace(digest=digest))


def step(turns: AdapterTurns, digests: str) -> str:
    """Begin a step with a request for each adapter, named by a letter; return those that it takes."""
    requests = [request(digest) for digest in digests]
    turns.begin(requests)
    return "".join(digest for digest, each in zip(digests, requests, strict=True) if turns.takes(each))


def test_adapters_take_turns_of_some_steps() -> None:
    turns = AdapterTurns(2)
    taken = [step(turns, "abcde") for _ in range(50 * TURN)]
    assert taken[:TURN] == ["ab"] * TURN
    assert taken[TURN : 2 * TURN] == ["cd"] * TURN
    assert taken[2 * TURN : 3 * TURN] == ["ae"] * TURN, "the one that never had a turn comes before the one whose turn ended first"
    for digest in "abcde":
        assert sum(digest in each for each in taken) == 20 * TURN, "as many steps for each"


@pytest.mark.parametrize("seed", range(5))
def test_every_adapter_is_served_after_a_bounded_number_of_steps(seed: int) -> None:
    """Requests come and go at random; at least one is always there for each of the adapters that are watched."""
    rng = random.Random(seed)
    most, count = rng.randint(1, 4), rng.randint(2, 12)
    names = "abcdefghijkl"[:count]
    turns, waited = AdapterTurns(most), dict.fromkeys(names, 0)
    watched = set(rng.sample(names, rng.randint(1, count)))
    for _ in range(1000):
        wanted = [name for name in names if name in watched or rng.random() < 0.4]
        rng.shuffle(wanted)
        taken = step(turns, "".join(wanted))
        assert len(taken) <= most
        assert len(taken) == min(most, len(wanted)), "no place is left empty"
        for name in names:
            waited[name] = 0 if name in taken or name not in wanted else waited[name] + 1
            assert waited[name] <= TURN * -(-count // most)


def drive(load: float, limit: float, steps: int, seed: int = 0) -> tuple[list[tuple[float, float]], float]:
    """Random score requests, ``load`` times what there is room for, refused where the wait would be beyond ``limit``.

    A step is a second, of 32 tokens. Returns each accepted request's predicted and real wait, and the share of steps' room that was
    used.
    """
    rng, clock = random.Random(seed), Clock()
    scheduler = make(slots=512, tokens=32, running=64, clock=clock)
    predicted: dict[str, tuple[float, float]] = {}
    waits: list[tuple[float, float]] = []
    used, owed = 0, 0.0
    for step in range(steps):
        owed += 32 * load
        while owed > 0:
            sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
            request = score(f"{step} {owed}", [rng.randrange(1 << 20) for _ in range(4)], *([1] * size for size in sizes))
            owed -= 4 + sum(sizes)
            if (wait := scheduler.wait_estimator.seconds(0)) <= limit:
                predicted[request.id] = wait, clock.now
                scheduler.add(request)
        batch = scheduler.schedule()
        used += batch.tokens
        for segment in batch.segments:
            if segment.request.id in predicted:
                wait, since = predicted.pop(segment.request.id)
                waits.append((wait, clock.now - since))
        clock.now += 1
        settle(scheduler, batch, lambda: 7)
    return waits, used / (32 * steps)


def test_nobody_waits_longer_than_the_limit_and_no_room_is_left_unused() -> None:
    waits, used = drive(load=3, limit=8, steps=300)
    assert used > 0.98
    assert max(real for _, real in waits[50:]) <= 8 * 1.2 + 1
    assert sum(real for _, real in waits) / len(waits) > 6, "the queue is as long as it may be"
    for wait, real in waits[50:]:
        assert real == pytest.approx(wait, abs=0.15 * wait + 1)


def test_nobody_is_refused_where_there_is_room() -> None:
    waits, _ = drive(load=0.8, limit=8, steps=300)
    assert len(waits) == pytest.approx(0.8 * 32 * 300 / 12.75, rel=0.1)
    assert max(wait for wait, _ in waits) < 8


def test_a_burst_upon_an_idle_engine_is_taken() -> None:
    scheduler = make()
    for place in range(200):
        assert scheduler.wait_estimator.seconds(0) == 0
        scheduler.add(score(str(place), [1], [2]))


def test_small_requests_one_by_one_say_nothing_about_the_pace() -> None:
    """Each waits a step, but not because the engine could not have been faster."""
    clock = Clock()
    scheduler = make(clock=clock)
    for place in range(50):
        scheduler.add(score(str(place), [place], [2]))
        settle(scheduler, scheduler.schedule(), lambda: 7)
        clock.now += 1
    for place in range(100):
        scheduler.add(score(f"late {place}", [1], [2]))
    assert scheduler.wait_estimator.seconds(0) == 0


def test_lower_priorities_are_not_in_the_way() -> None:
    clock = Clock()
    scheduler = make(clock=clock)

    def request(place: int, priority: int) -> ScoringRequest:
        return ScoringRequest.of(wire.Score(str(place), [place], [[2] * 31], wire.Labels([1]), priority=priority), 0.0)

    for place in range(10):
        scheduler.add(request(place, priority=5))
    for _ in range(2):
        settle(scheduler, scheduler.schedule(), lambda: 7)
        clock.now += 1
    assert scheduler.wait_estimator.seconds(priority=0) == 0
    assert scheduler.wait_estimator.seconds(priority=5) == pytest.approx(8)
    for waiting in scheduler.requests:
        scheduler.remove(waiting)
    assert scheduler.wait_estimator.seconds(priority=5) == 0
    assert not scheduler.wait_estimator._tokens, "priorities are callers' own, and forgotten with the last request"


def test_where_slots_are_what_lacks_it_takes_as_long_as_it_takes() -> None:
    """Generations hold all slots, so that nothing moves: the queue is as long as it has stood."""
    clock = Clock()
    scheduler = make(slots=40, running=8, clock=clock)
    for place in range(2):
        scheduler.add(generate(f"g{place}", [place * 20 + token for token in range(18)], max_tokens=2))
    scheduler.schedule()
    scheduler.add(score("s", [5] * 20, [6] * 10))
    for _ in range(5):
        scheduler.schedule()
        clock.now += 1
    assert scheduler.wait_estimator.seconds(0) == pytest.approx(4, rel=0.15)
    scheduler.remove(scheduler.get("s"))
    assert scheduler.wait_estimator.seconds(0) == 0
