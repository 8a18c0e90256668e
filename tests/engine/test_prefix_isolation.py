"""The prefix cache between cache salts, and requests that leave nothing in it."""

from __future__ import annotations

import pytest

from engine import wire
from engine.requests.core import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.integrity import SlotContents, check
from tests.engine.test_scheduler import drain, generate, make, score, settle

PROMPT = [5, 6, 7, 8, 9]
ALICE, BOB = wire.Caller(tenant="a", cache_salt="alice"), wire.Caller(tenant="b", cache_salt="bob")
PRIVATE = wire.Caller(tenant="a", keep_prefix=False)
GUIDANCE = wire.LengthGuidance(scale=1.0, top_k=2)


def nodes(scheduler: Scheduler) -> int:
    return sum(len(list(kv_pool.cache.nodes())) for kv_pool in scheduler.kv_pools)


def cost(scheduler: Scheduler, request: Request, contents: SlotContents) -> tuple[list[int], int, int]:
    """Tokens of each step until a request has ended, and what it found and computed, on both models."""
    loads = []
    scheduler.add(request)
    while scheduler.get(request.id) is request:
        batch = scheduler.schedule()
        loads.append(batch.load)
        contents.compute(batch)
        settle(scheduler, batch, lambda: 3)
        contents.adopt()
        check(scheduler)
    with_aux = request.with_aux
    return loads, sum(part.cached_tokens for part in with_aux), sum(part.computed_tokens for part in with_aux)


def requests(caller: wire.Caller, name: str) -> list[Request]:
    return [
        score(f"{name} score", PROMPT, [1, 2], [3], caller=caller),
        generate(f"{name} text", PROMPT, max_tokens=4, caller=caller),
        generate(f"{name} guided", PROMPT, max_tokens=4, length_guidance=GUIDANCE, caller=caller),
        generate(f"{name} next turn", [*PROMPT, 3, 3, 3, 3, 4], max_tokens=2, length_guidance=GUIDANCE, caller=caller),
    ]


def test_another_salt_finds_nothing_and_takes_as_long():
    """The cost of a prompt does not reveal whether another salt has it: neither the prompt nor an adopted answer, on both
    models."""
    known, fresh = make(tokens=4, length_slots=256), make(tokens=4, length_slots=256)
    contents = SlotContents()
    for request in requests(ALICE, "alice"):
        cost(known, request, contents)
    other = SlotContents()
    for beside, alone in zip(requests(BOB, "bob"), requests(BOB, "bob"), strict=True):
        assert cost(known, beside, contents) == cost(fresh, alone, other)


@pytest.mark.parametrize("kind", range(4))
def test_equal_salts_share(kind: int):
    scheduler, contents = make(length_slots=256), SlotContents()
    first, again = (requests(ALICE, name)[kind] for name in ("first", "again"))
    assert cost(scheduler, first, contents)[1] == 0
    assert cost(scheduler, again, contents)[1] > 0


def test_salts_do_not_share_within_a_step():
    scheduler = make(tokens=100)
    alice, bob, also_bob = (score(name, PROMPT, [1], caller=caller) for name, caller in zip("abc", (ALICE, BOB, BOB), strict=True))
    for request in (alice, bob, also_bob):
        scheduler.add(request)
    scheduler.schedule()
    scheduler.schedule()  # tenants share the first step
    assert [request.cached_tokens for request in (alice, bob, also_bob)] == [0, 0, 5]
    assert [request.computed_tokens for request in (alice, bob, also_bob)] == [6, 6, 1]


def test_salts_compete_for_slots_by_age():
    scheduler, contents = make(slots=64, tokens=64), SlotContents()
    for place in range(30):
        caller = wire.Caller(cache_salt=f"salt {place}")
        cost(scheduler, score(str(place), [place] * 10, [1], caller=caller), contents)
        assert len(scheduler.cache.roots) <= 7, "a tree ends with its last tokens"
    salts = {root.salt for root in scheduler.cache.roots}
    assert salts == {"", *(f"salt {place}" for place in range(24, 30))}, "the least recently used go first"


def test_unknown_salts_leave_no_trees():
    scheduler = make()
    for place in range(500):
        scheduler.add(score(str(place), [], [1], caller=wire.Caller(cache_salt=str(place))))
    drain(scheduler)
    assert scheduler.cache.roots == [scheduler.cache.root]


@pytest.mark.parametrize("kind", range(4))
def test_a_private_request_leaves_nothing(kind: int):
    scheduler, contents = make(length_slots=256), SlotContents()
    for name in ("first", "again"):
        _, cached, _ = cost(scheduler, requests(PRIVATE, name)[kind], contents)
        assert cached == 0
        assert nodes(scheduler) == 0
        assert all(kv_pool.pool.available == kv_pool.pool.size for kv_pool in scheduler.kv_pools)


def test_a_private_request_shares_nothing():
    scheduler, contents = make(tokens=100, length_slots=256), SlotContents()
    plain = wire.Caller()
    cost(scheduler, requests(plain, "kept")[2], contents)
    kept = nodes(scheduler)
    assert cost(scheduler, requests(PRIVATE, "private")[2], contents)[1] == 0
    assert nodes(scheduler) == kept
    together = [score(name, [60, 61], [1], caller=PRIVATE) for name in "xy"]
    for request in together:
        scheduler.add(request)
    drain(scheduler, contents=contents)
    assert [request.computed_tokens for request in together] == [3, 3]


@pytest.mark.parametrize("end", ["aborted", "failed", "preempted"])
def test_a_private_request_leaves_nothing_however_it_ends(end: str):
    scheduler, contents = make(slots=64, tokens=4, length_slots=64), SlotContents()
    request = generate("g", list(range(20)), max_tokens=30, n=2, length_guidance=GUIDANCE, caller=PRIVATE)
    scheduler.add(request)
    for _ in range(9):
        batch = scheduler.schedule()
        contents.compute(batch)
        settle(scheduler, batch, lambda: 3)
        contents.adopt()
    assert nodes(scheduler) > 0
    if end == "preempted":
        scheduler.allocator.preempt(request)
        assert nodes(scheduler) == 0
        check(scheduler)
        drain(scheduler, contents=contents)
        assert request.computed_tokens > 20 + 60, "it was computed again"
    elif end == "failed":
        scheduler.fail(scheduler.schedule())
    else:
        scheduler.remove(request)
    check(scheduler)
    assert nodes(scheduler) == 0
    assert all(kv_pool.pool.available == kv_pool.pool.size for kv_pool in scheduler.kv_pools)
