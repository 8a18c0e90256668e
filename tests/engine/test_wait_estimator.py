"""Predicted waits of requests against actual waits, on the test's own clock."""

from __future__ import annotations

import random

import pytest

from engine import wire
from engine.requests.core import ScoringRequest
from tests.engine.test_scheduler import Clock, generate, make, score, settle


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
            if (wait := scheduler.wait_seconds()) <= limit:
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
        assert scheduler.wait_seconds() == 0
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
    assert scheduler.wait_seconds() == 0


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
    assert scheduler.wait_seconds(priority=0) == 0
    assert scheduler.wait_seconds(priority=5) == pytest.approx(8)
    for waiting in scheduler.requests:
        scheduler.remove(waiting)
    assert scheduler.wait_seconds(priority=5) == 0
    assert not scheduler._wait_estimator._tokens, "priorities are callers' own, and forgotten with the last request"


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
    assert scheduler.wait_seconds() == pytest.approx(4, rel=0.15)
    scheduler.remove(scheduler.get("s"))
    assert scheduler.wait_seconds() == 0
