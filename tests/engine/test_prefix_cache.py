"""The prefix cache: what tenants share of it, what is evicted, and what is pinned."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.integrity import SlotContents, check
from tests.engine.parity import some_tokens
from tests.engine.test_item_scores import LABELS, answer, make_loop, message
from tests.engine.test_loop import run
from tests.engine.test_scheduler import drain, generate, make, score, settle
from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.kvcache.prefix_cache import Node, PrefixCache, SlotPool
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.scheduling.scheduler import Scheduler

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


HEAD, TAIL = 30, 150


class Cache:
    """A prefix cache that keeps items."""

    def __init__(self, slots: int) -> None:
        self.pool = SlotPool(slots)
        self.cache = PrefixCache(self.pool)

    def use(self, item: Ints, *ends: int, salt: str = "") -> Node:
        """Use an item once, as a request does. Steps that insert what is missing end at ``ends``."""
        node, found = self.cache.match_prefix(self.cache.acquire_root(salt), item)
        begin = len(found)
        for end in [*(end for end in ends if end < len(item)), len(item)]:
            if end > begin:
                self.cache.evict(end - begin - self.pool.available)
                node = self.cache.insert(node, item[begin:end], self.pool.allocate(end - begin), item=True)
                begin = end
        self.cache.release(node)
        return node

    def uses(self, node: Node) -> int:
        """Recent uses of an item as the cache estimates them."""
        return self.cache._evictor._sketch.count(node.key)

    def has(self, item: Ints) -> bool:
        return self.cache.matched_length("", item) == len(item)


def similar(count: int, seed: int = 0) -> list[Ints]:
    """Items with the same first tokens. The first tokens behind them differ."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 1 << 17, HEAD, np.int32)
    return [np.array([*head, number, *rng.integers(0, 1 << 17, TAIL - 1)], np.int32) for number in range(count)]


def test_an_item_keeps_its_uses_when_a_similar_one_divides_it() -> None:
    found, (hot, other) = Cache(2000), similar(2)
    for _ in range(10):
        found.use(hot)
    found.use(other)
    node = found.use(hot)
    assert len(node.tokens) == TAIL, "the common beginning is a node of its own"
    assert (found.uses(node), node.protected) == (11, True)
    assert node.parent is not None
    assert found.uses(node.parent) == 12, "the beginning was used with both"


def test_an_evicted_item_comes_back_with_its_uses() -> None:
    """Twice: below the beginning that a similar item kept, and in other parts than before."""
    found, (hot, other) = Cache(HEAD + 2 * TAIL + 20), similar(2)
    for _ in range(10):
        found.use(hot)
    for _ in range(12):
        found.use(other)
    found.cache.evict(TAIL)
    assert (found.has(hot), found.has(other)) == (False, True)
    node = found.use(hot)
    assert (found.uses(node), node.protected) == (11, True)
    found.cache.clear()
    node = found.use(hot, 20, 90)
    assert (len(node.tokens), found.uses(node), node.protected) == (HEAD + TAIL - 90, 12, True)


def test_a_scan_leaves_hot_items_with_a_common_beginning() -> None:
    """Each hot item is computed again once in between, below the beginning that the others kept."""
    items = similar(40)
    hot, cold = items[:5], items[5:]
    found = Cache(HEAD + 8 * TAIL)
    for _ in range(6):
        for item in hot:
            found.use(item)
    for item in hot:
        found.cache._remove(found.use(item))
        found.use(item)
    for item in cold:
        found.use(item)
    assert [found.has(item) for item in hot] == [True] * 5


class Engine:
    """A loop with room for 100 items of 10 tokens."""

    def __init__(self, causal: Path, **settings: object) -> None:
        self.random = random.Random(3)
        self.loop: Loop = make_loop(causal, **({"max_total_tokens": 1000, "max_batched_tokens": 300} | settings))
        self._names = iter(range(10_000))

    def items(self, count: int, tokens: int = 10) -> list[list[int]]:
        return [some_tokens(self.random, tokens, tokens) for _ in range(count)]

    def score(self, items: list[list[int]], **fields: object) -> wire.Scored:
        return answer(run(self.loop, message(f"m{next(self._names)}", items, [7, 8], **fields), checked=True))


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
    assert len(engine.score(engine.items(3, 300)).rows) == 3
