"""Tenants share the engine by weight: tokens, places, slots and the queue, on a clock of the test's own."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.integrity import SlotContents, check
from tests.engine.tenants import Clock, Simulation, Tenant, mixed, scores, texts
from tests.engine.test_scheduler import generate, make, random_request, score, settle, take
from yardstick_llm.engine import wire
from yardstick_llm.engine.requests.core import Request, ScoringRequest
from yardstick_llm.engine.scheduling.scheduler import CONTENDED_SHARE

SMALL, MEDIUM, LARGE = scores(10, 5, 10), scores(), scores(100, 50, 60)
TEXT = texts()

FLOODS = {
    "scores beside scores": (MEDIUM, MEDIUM, {}),
    "scores beside a mixture": (MEDIUM, mixed(LARGE, LARGE, TEXT), {}),
    "texts beside scores": (texts(200, 8), MEDIUM, {}),
    "few places, texts": (texts(100, 20), texts(100, 20), {"running": 4, "tokens": 256}),
    "few slots, scores": (MEDIUM, MEDIUM, {"slots": 2048}),
    "few slots, texts": (TEXT, TEXT, {"slots": 1024}),
}


def p99(victim: Tenant, flood: Tenant, **engine) -> float:
    return float(np.percentile(Simulation(victim, flood, **engine).run(victim.name, 60), 99))


@pytest.mark.slow
@pytest.mark.parametrize("case", FLOODS)
def test_a_flood_raises_the_p99_of_others_by_a_fifth_at_most(case: str):
    victim, other, engine = FLOODS[case]
    busy, *flooded = (p99(Tenant("b", victim, pause=0.3), Tenant("a", other, at_once), **engine) for at_once in (3, 64, 256))
    assert max(flooded) <= 1.2 * busy, (busy, flooded)


def test_what_a_tenant_does_not_use_goes_to_the_others():
    floods = [Tenant("a", MEDIUM, 64), Tenant("b", MEDIUM, 64, weight=2)]
    simulation = Simulation(*floods, Tenant("c", SMALL, 1, weight=5))
    room = int(CONTENDED_SHARE * 2048)
    for _ in range(200):
        assert simulation.step().load == room
    assert floods[1].tokens / floods[0].tokens == pytest.approx(2, rel=0.05)


def test_a_newcomer_has_its_share_in_the_next_step():
    simulation = Simulation(Tenant("flood", MEDIUM, 256))
    for _ in range(5):
        simulation.step()
    simulation.scheduler.add(score("new", [9] * 100, *([[8] * 50] * 20), caller=wire.Caller(tenant="new")))
    batch = simulation.scheduler.schedule()
    own = sum(len(segment.tokens) for segment in batch.segments if segment.request.id == "new")
    assert own >= batch.load // 2 - batch.load // 8


def test_a_tenant_that_returns_has_saved_up_nothing():
    away, other = Tenant("away", MEDIUM, 4), Tenant("other", MEDIUM, 8)
    simulation = Simulation(away, other)
    for _ in range(50):
        simulation.step()
    coming, away.arrivals = 4, [float("inf")]  # what is open ends, and nothing follows
    for _ in range(400):
        simulation.step()
    away.arrivals = [simulation.clock.now] * coming
    before = away.tokens, other.tokens
    for _ in range(50):
        simulation.step()
    assert (away.tokens - before[0]) / (other.tokens - before[1]) == pytest.approx(1, rel=0.15)


@pytest.mark.slow
def test_leaving_between_two_requests_does_not_pay():
    """With more tenants than a step has quanta, one that leaves in debt and returns waits for its turn like the others."""
    others = [Tenant(f"t{place}", scores(0, 1, 64), 4) for place in range(24)]
    leaver = Tenant("leaver", scores(0, 1, 64), 1)
    simulation = Simulation(leaver, *others, tokens=1024)
    for _ in range(600):
        simulation.step()
    fair = np.mean([tenant.tokens for tenant in others])
    assert leaver.tokens <= 1.25 * fair


def test_a_newcomer_takes_a_place_from_a_flood():
    scheduler = make(slots=4096, tokens=64, running=8)
    for place in range(20):
        scheduler.add(generate(f"a{place}", [place, 1], max_tokens=1000, caller=wire.Caller(tenant="a")))
    for _ in range(8):
        settle(scheduler, scheduler.schedule(), lambda: 7)
    assert [request.id for request in scheduler.running] == [f"a{place}" for place in range(8)]
    for place in range(6):
        scheduler.add(generate(f"b{place}", [100 + place, 1], max_tokens=1000, caller=wire.Caller(tenant="b")))
        settle(scheduler, scheduler.schedule(), lambda: 7)
        check(scheduler)
    held = [request.id for request in scheduler.running]
    assert held == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"], "half the places, and no more than that"
    for _ in range(20):
        settle(scheduler, scheduler.schedule(), lambda: 7)
    assert [request.id for request in scheduler.running] == held, "nobody takes them back"


def test_a_newcomer_takes_slots_from_a_flood():
    scheduler = make(slots=200, tokens=64, running=64)
    for place in range(12):
        scheduler.add(generate(f"a{place}", [place] * 20, max_tokens=40, caller=wire.Caller(tenant="a")))
    while scheduler.pool.available + scheduler.cache.evictable > 5:
        settle(scheduler, scheduler.schedule(), lambda: 7)
    oldest = scheduler.running[0]
    new = score("new", [50] * 10, [51] * 5, caller=wire.Caller(tenant="b"))
    scheduler.add(new)
    batch = scheduler.schedule()
    check(scheduler)
    assert sum(len(segment.tokens) for segment in batch.segments if segment.request is new) > 0
    assert oldest in scheduler.running
    settle(scheduler, batch, lambda: 7)


@pytest.mark.slow
def test_tenants_do_not_take_slots_from_each_other_for_ever():
    """Two tenants that together need far more than there is: what is computed twice is bounded, and both get on."""
    simulation = Simulation(Tenant("a", texts(60, 60), 16), Tenant("b", texts(60, 60), 16), slots=800, tokens=256)
    simulation.each_step = lambda batch: check(simulation.scheduler)
    for _ in range(800):
        simulation.step()
    ended = [len(tenant.latencies) for tenant in simulation.tenants.values()]
    assert min(ended) > 0.7 * max(ended)
    needed = sum(ended) * 120
    computed = sum(tenant.tokens for tenant in simulation.tenants.values())
    assert computed < 2.5 * needed


def test_priority_orders_one_tenants_requests_and_no_others():
    clock = Clock()
    scheduler = make(slots=4096, tokens=4, running=1, clock=clock)

    def request(name: str, tenant: str, priority: int, size: int = 1) -> Request:
        return score(name, [], [1] * size, priority=priority, caller=wire.Caller(tenant=tenant))

    for place in range(4):
        scheduler.add(request(f"greedy{place}", "a", priority=-(2**31)))
        scheduler.add(request(f"plain{place}", "b", priority=3 - place))
    order = []
    while scheduler.requests:
        batch = scheduler.schedule()
        order += [segment.request.id for segment in batch.segments]
        settle(scheduler, batch, None)
    assert [name for name in order if name.startswith("plain")] == ["plain3", "plain2", "plain1", "plain0"]
    first_half = order[:4]
    assert sum(name.startswith("plain") for name in first_half) == 2, order


def test_requests_age():
    """However many urgent requests follow, one without urgency is begun before those that come 50 s after it."""
    clock = Clock()
    scheduler = make(tokens=1, running=1, clock=clock)

    def add(name: str, priority: int) -> None:
        scheduler.add(ScoringRequest.of(wire.Score(name, [], [[1]], wire.Labels([1]), priority=priority), clock.now))

    add("plain", 0)
    began = None
    for second in range(110):
        for place in range(2):
            add(f"urgent {second} {place}", -(2**31))
        batch = scheduler.schedule()
        if batch.segments[0].request.id == "plain":
            began = second
            break
        settle(scheduler, batch, None)
        clock.now += 1
    assert began is not None
    assert began <= 101


def test_who_has_begun_is_not_displaced():
    scheduler = make(slots=24, tokens=64, running=8)
    for place in range(3):
        scheduler.add(generate(f"a{place}", [place] * 6, max_tokens=17, caller=wire.Caller(tenant="a")))
    while len(scheduler.running) != 2 or scheduler.waiting != 1:
        settle(scheduler, scheduler.schedule(), lambda: 7)
    assert scheduler.displace(wire.Caller(tenant="b")) is None


def test_a_tenant_waits_for_its_own_requests_at_its_share_of_the_pace():
    clock = Clock()
    scheduler = make(slots=8192, tokens=128, running=64, clock=clock)
    for place in range(60):
        scheduler.add(score(f"a{place}", [place], [2] * 31, caller=wire.Caller(tenant="a")))
    for place in range(20):
        scheduler.add(score(f"b{place}", [100 + place], [2] * 31, caller=wire.Caller(tenant="b")))
    for _ in range(10):
        settle(scheduler, scheduler.schedule(), None)
        clock.now += 1
    # A step is of 32 tokens, half of them each tenant's: some 16 requests of b and 55 of a are left.
    assert scheduler.wait_estimator.seconds(0, tenant="c") == 0
    left = {tenant: sum(r.caller.tenant == tenant and not r.begun for r in scheduler.requests) for tenant in "ab"}
    predicted = {tenant: scheduler.wait_estimator.seconds(0, tenant=tenant) for tenant in "ab"}
    assert predicted["b"] == pytest.approx(2 * left["b"], rel=0.2)
    assert predicted["a"] == pytest.approx(left["a"] + left["b"], rel=0.2)
    assert scheduler.wait_estimator.longest() == predicted["a"]


CALLERS = [
    wire.Caller(tenant=tenant, weight=weight, cache_salt=salt, keep_prefix=keeps)
    for tenant, weight in (("a", 1.0), ("b", 4.0), ("c", 0.25))
    for salt, keeps in (("", True), ("x", True), ("y", True), ("", False))
]


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 5, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    slots=st.sampled_from([64, 90, 400]),
    tokens=st.sampled_from([5, 16, 64]),
    running=st.sampled_from([2, 8]),
    guided=st.sampled_from(["no", "guided", "with forecasts"]),
)
def test_random_requests_of_several_tenants_end_and_every_slot_has_one_owner(seed, slots, tokens, running, guided):
    rng, clock, forecasts, guided = random.Random(seed), Clock(), guided == "with forecasts", guided != "no"
    scheduler = make(slots, tokens, running, clock, length_slots=slots if guided else 0, forecasts=forecasts)
    contents, added, alive = SlotContents(), 0, 0.4 * rng.random()

    def step() -> None:
        batch = scheduler.schedule()
        if rng.random() < 0.02:
            scheduler.fail(batch)
        else:
            take(scheduler, batch, lambda: rng.randrange(3), contents, lambda: rng.random() < 0.5)
        clock.now += rng.choice([0.01, 1.0])
        check(scheduler)

    for _ in range(120):
        while rng.random() < alive:
            scheduler.add(random_request(rng, f"r{added}", guided=guided, caller=rng.choice(CALLERS), now=clock.now))
            added += 1
        if scheduler.requests and rng.random() < 0.05:
            scheduler.remove(rng.choice(scheduler.requests))
        step()
    most = 50 * (added + 1) * 60
    while scheduler.requests:
        step()
        most -= 1
        assert most > 0, "somebody starves"
    for kv_pool in scheduler.kv_pools:
        kv_pool.cache.clear()
        assert kv_pool.pool.available == kv_pool.pool.size
        assert kv_pool.cache.roots == [kv_pool.cache.root]


@settings(max_examples=settings().max_examples * 3 // 10, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    weights=st.lists(st.sampled_from([0.2, 1.0, 1.5, 7.0]), min_size=2, max_size=4),
    tokens=st.sampled_from([64, 256]),
)
def test_steps_are_full_and_shares_are_exact_whatever_the_weights(seed, weights, tokens):
    """Work conservation, and the bound of start-time fair queueing on what two backlogged tenants get."""
    kinds = [SMALL, MEDIUM, mixed(SMALL, texts(40, 5))]
    rng = random.Random(seed)
    tenants = [Tenant(str(place), rng.choice(kinds), 24, weight) for place, weight in enumerate(weights)]
    simulation = Simulation(*tenants, tokens=tokens, seed=seed)
    room = int(CONTENDED_SHARE * tokens)
    for _ in range(20):
        simulation.step()
    before = [tenant.tokens for tenant in tenants]
    for _ in range(120):
        assert simulation.step().load >= room
    served = [(tenant.tokens - start) / tenant.weight for tenant, start in zip(tenants, before, strict=True)]
    assert max(served) - min(served) <= 3 * room / min(weights)
