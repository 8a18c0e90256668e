"""Which late scores are sent to a second replica: budget, room, and replicas that stay slow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.gateway.conftest import Clock
from tests.gateway.pool.fleet import MESSAGE, TOKENS, Fleet, fleet, rows, served_fleet
from tests.processes import until
from yardstick_llm.gateway.errors import Overloaded
from yardstick_llm.gateway.pool import hedging
from yardstick_llm.gateway.pool.fanout import FanOut, Prompts
from yardstick_llm.gateway.pool.hedging import Quantile
from yardstick_llm.gateway.pool.replica import Health


@pytest.fixture(autouse=True, scope="module")
def engines() -> Iterator[None]:
    with served_fleet():
        yield


def only(hedged: Fleet) -> None:
    hedged.replicas[1].ready = False


def draining(hedged: Fleet) -> None:
    hedged.replicas[1].draining = True


def on_trial(hedged: Fleet) -> None:
    hedged.replicas[1].health.returns = 0.0


def busy(hedged: Fleet) -> None:
    hedged.replicas[1].tokens = TOKENS + 1


def poor(hedged: Fleet) -> None:
    hedged.hedges.tokens = TOKENS - 1


@pytest.mark.parametrize("state", [only, draining, on_trial, busy, poor])
async def test_without_room_there_is_no_hedge(state: object) -> None:
    async with fleet() as hedged:
        hedged.engines[0].faults.delay = 0.2
        state(hedged)
        await hedged.score()
        assert hedged.engines[1].scores == []
        denied = {} if state in (only, draining) else {"budget" if state is poor else "saturation": 1}
        assert hedged.counts() == denied


@pytest.mark.parametrize("budget", [TOKENS * 10, TOKENS * 1000])
async def test_engines_that_all_become_slow_get_few_hedges(budget: int) -> None:
    """Each of 200 requests is late at once. Hedges stay within the budget, and within a number."""
    async with fleet(4, budget=budget) as hedged:
        for engine in hedged.engines:
            engine.faults.hold = True
        asking = [asyncio.create_task(hedged.score()) for _ in range(200)]
        await until(lambda: sum(hedged.counts().values()) > 150)
        await until(lambda: sum(len(engine.scores) for engine in hedged.engines) > 200)  # all of them have arrived, and hedges
        sent = sum(len(engine.scores) for engine in hedged.engines) - 200
        assert 0 < sent <= min(budget // TOKENS, hedging.MAX_HEDGES)
        for engine in hedged.engines:
            engine.faults.hold = False
        assert all(answer.rows == rows(hedged.engines[0]) for answer in await asyncio.gather(*asking))
        await until(hedged.is_idle)


async def test_a_replica_that_loses_races_is_ejected() -> None:
    async with fleet(4) as hedged:
        slow = hedged.replicas[0]
        hedged.engines[0].faults.hold = True
        for _ in range(6):
            await hedged.score()
        assert slow.state == "ejected"
        assert hedged.counts()["won"] >= 3  # on a busy machine, others may be late too
        assert 'yardstick_engine_ejections_total{model="fake"} 1.0' in b"".join(hedged.telemetry.exposition()).decode()


def test_health_of_a_slow_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("yardstick_llm.gateway.pool.replica.monotonic", clock.monotonic)
    health = Health(tolerance=2, seconds=10)
    assert not health.failed(slow=True)
    assert health.failed(slow=True)
    assert (health.ejected, health.slow) == (True, True)
    clock.now += 13
    assert health.half_open
    assert health.failed(slow=True), "a lost trial ejects at once"
    clock.now += 13
    assert health.ejected, "and for longer"
    health.succeeded()
    assert (health.returns, health.failures, health.slow, health.ejections) == (None, 0, False, 0)
    health.failed()
    health.failed(slow=True)
    assert (health.ejected, health.slow) == (True, False)


async def test_a_slow_replica_helps_under_load() -> None:
    async with fleet(3) as hedged:
        slow, *others = hedged.replicas
        for _ in range(3):
            slow.health.failed(slow=True)
        assert all(hedged.model.choose(TOKENS) in others for _ in range(20))
        for other in others:
            other.tokens = 3 * TOKENS
        assert hedged.model.choose(TOKENS) is slow, "another one would have four times as much"
        assert hedged.model.choose(TOKENS, tried=[slow]) in others
        slow.tokens = TOKENS
        assert hedged.model.choose(TOKENS) in others
        hedged.dispatcher._record_failure(Overloaded("full"), others[0], hedged.model)
        assert slow.state == "ready", "all are needed"


async def test_what_can_wait_has_no_hedge() -> None:
    async with fleet() as hedged:
        fan_out = FanOut(hedged.dispatcher, hedged.telemetry, split_tokens=4096)
        for engine in hedged.engines:
            engine.faults.delay = 0.1
        prompts = Prompts(MESSAGE.prefix, MESSAGE.branches, MESSAGE.readout, priority=1)
        await fan_out.run(hedged.model, prompts, prompts.branches, lambda *_: None, None)
        assert sum(len(engine.scores) for engine in hedged.engines) == 1
        assert hedged.counts() == {}


def test_the_quantile_follows_the_last_answers() -> None:
    quantile = Quantile()
    for seconds, count in ((5.0, 19), (1.0, 2000), (0.01, 3 * hedging.WINDOW)):
        for _ in range(count):
            quantile.add(seconds)
        if count < hedging.MIN_ANSWERS:
            assert quantile.value is None, "too few"
        else:
            assert seconds <= quantile.value <= 1.2 * seconds
