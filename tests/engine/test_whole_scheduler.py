"""Steps of whole sequences: shares of tenants and requests, and what becomes of requests that end early."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.encoders import CONTEXT, make_encoder
from tests.engine.parity import assert_equal_rows, some_tokens
from tests.engine.test_encoders import build
from yardstick_llm.engine import wire
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.requests.core import ScoringRequest
from yardstick_llm.engine.runner.runner import Runner
from yardstick_llm.engine.scheduling.scheduler import Budget
from yardstick_llm.engine.scheduling.whole import WholeScheduler

BUDGET = 256


class Steps:
    """A scheduler whose steps end at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scheduler = WholeScheduler(Budget(BUDGET, 8), lambda: self.now)
        self.done: dict[str, int] = {}
        """Step in which each request ended."""
        self.count = 0

    def add(self, name: str, lengths: list[int], tenant: str = "", weight: float = 1.0, priority: int = 0) -> None:
        caller = wire.Caller(tenant=tenant, weight=weight)
        message = wire.Score(name, [], [[5] * length for length in lengths], wire.Embedding(), priority, caller=caller)
        self.now += 0.001
        self.scheduler.add(ScoringRequest.of(message, self.now, whole=True))

    def step(self) -> Batch:
        self.count += 1
        batch = self.scheduler.schedule()
        for segment in batch.segments:
            assert segment.branch is not None
            assert segment.completes
            self.scheduler.finish(segment.branch)
            if not segment.request.branches:
                self.done[segment.request.id] = self.count
        return batch


def test_a_step_is_full_and_in_order_of_length() -> None:
    steps = Steps()
    steps.add("a", [60, 10, 60, 30])
    steps.add("b", [96, 50])
    batch = steps.step()
    lengths = [segment.tokens.size for segment in batch.segments]
    assert lengths == sorted(lengths)
    assert BUDGET - 60 < batch.tokens <= BUDGET
    steps.step()
    assert set(steps.done) == {"a", "b"}
    assert steps.scheduler.idle
    assert steps.step().empty


def test_requests_of_few_texts_do_not_wait_for_one_of_many() -> None:
    steps = Steps()
    steps.add("many", [32] * 400)
    steps.step()
    for number in range(10):
        steps.add(f"few {number}", [32])
    while not steps.scheduler.idle:
        steps.step()
    assert max(done for name, done in steps.done.items() if name != "many") <= 5
    assert steps.done["many"] == 52, "the steps are full"


@pytest.mark.parametrize(("flood", "most"), [("", 20), ("b", 4)])
def test_a_sequence_longer_than_a_step_is_not_starved(flood: str, most: int) -> None:
    """By short ones of the same tenant, which came before, and of another one."""
    steps = Steps()
    for number in range(40):
        steps.add(f"short {number}", [20] * 20, tenant=flood)
    steps.add("long", [4 * BUDGET])
    while "long" not in steps.done:
        steps.step()
        steps.add(f"new {steps.count}", [20] * 20, tenant=flood)
    assert steps.count <= most


def test_tenants_share_by_weight() -> None:
    steps, computed = Steps(), Counter[str]()
    for number in range(60):
        steps.add(f"a{number}", [50] * 10, "a")
        steps.add(f"b{number}", [8] * 60, "b", weight=3.0)
    for _ in range(200):
        for segment in steps.step().segments:
            computed[segment.request.caller.tenant] += segment.tokens.size
    assert 0.21 < computed["a"] / computed.total() < 0.29


def test_priorities_order_the_requests_of_a_tenant() -> None:
    steps = Steps()
    steps.add("late", [32] * 40, priority=5)
    steps.step()
    steps.add("early", [32] * 40, priority=-5)
    while not steps.scheduler.idle:
        steps.step()
    assert steps.done["early"] == 6
    assert steps.done["late"] == 10


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.mark.slow
def test_every_request_ends_once_with_the_rows_that_it_has_alone(encoder: Path) -> None:
    """Requests come and are aborted while others are computed, of three tenants, some with a deadline that has passed."""
    rng = random.Random(5)
    loop = build(encoder, max_batched_tokens=BUDGET, overlap=True)
    sent: dict[str, wire.Score] = {}
    replies: dict[str, wire.Reply] = {}
    for number in range(60):
        branches = [some_tokens(rng, 1, CONTEXT - 10) for _ in range(rng.choice((1, 1, 2, 30)))]
        caller = wire.Caller(tenant=rng.choice("abc"), weight=rng.choice((1.0, 2.0)))
        deadline = -1.0 if number % 20 == 19 else None
        prefix = some_tokens(rng, 0, 10)
        sent[str(number)] = wire.Score(str(number), prefix, branches, wire.Embedding(), deadline=deadline, caller=caller)
        loop.submit(sent[str(number)])
        if number % 15 == 14:
            loop.submit(wire.Abort(str(rng.randrange(number))))
        for reply in loop.step():
            assert reply.id not in replies
            replies[reply.id] = reply
    while not loop.idle:
        for reply in loop.step():
            assert reply.id not in replies
            replies[reply.id] = reply
    assert replies.keys() == sent.keys()
    codes = Counter(reply.code if isinstance(reply, wire.Failed) else "scored" for reply in replies.values())
    assert codes["deadline"] == 3
    assert codes["aborted"] >= 1
    assert (loop.stats.running, loop.stats.waiting, loop.stats.tenants, loop.stats.slots_total) == (0, 0, 0, 0)
    for name, reply in list(replies.items())[::7]:
        if isinstance(reply, wire.Scored):
            loop.submit(sent[name])
            found: list[wire.Reply] = []
            while not loop.idle:
                found += loop.step()
            assert isinstance(found[0], wire.Scored)
            assert_equal_rows(reply.rows, found[0].rows)


def test_a_failed_step_ends_its_requests_alone(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = build(encoder, max_batched_tokens=BUDGET)
    launch, calls = Runner.launch, [0]

    def failing(self: Runner, batch: Batch):
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("out of luck")
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", failing)
    found = {}
    for name in ("first", "second"):
        loop.submit(wire.Score(name, [], [[5] * 100] * 4, wire.Embedding()))
        while not loop.idle:
            found |= {reply.id: type(reply) for reply in loop.step()}
    assert found == {"first": wire.Failed, "second": wire.Scored}


def test_a_full_queue_refuses(encoder: Path) -> None:
    loop = build(encoder, max_waiting=2)
    for number in range(3):
        loop.submit(wire.Score(str(number), [], [[5] * 100], wire.Embedding()))
    (refused, *scored) = loop.step()
    assert isinstance(refused, wire.Failed)
    assert (refused.id, refused.code) == ("2", "overloaded")
    assert len(scored) == 2


def test_the_rest_of_a_nearly_empty_queue_promises_no_long_wait() -> None:
    """The tokens that a step begins are counted over the time in which it computes them."""
    steps = Steps()
    for _ in range(3):
        for number in range(9):
            steps.add(f"{steps.count} {number}", [30])  # one more than fit a step
        while not steps.scheduler.idle:
            steps.step()
            steps.now += 1.0
    for number in range(9):
        steps.add(f"last {number}", [30])
    assert steps.scheduler.wait_estimator.seconds(0) < 3.0
