"""When the pool probes engines, and when it asks them for their adapters."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

from tests.fakes import FakeEngine, adapter, served
from tests.gateway.pool.test_pool import Told, engines_ready, pool_of
from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.pool.pool import PHASES, Pool

RED, BLUE = adapter("aa11", "red"), adapter("bb22", "blue")


def with_adapters(*adapters: wire.Adapter, names_revisions: bool = True) -> FakeEngine:
    return FakeEngine(adapters={each.name: each for each in adapters}, names_revisions=names_revisions)


def known(pool: Pool) -> dict[str, str]:
    """Name and digest of the adapters that some replica has."""
    return {name: model.adapter.digest for name, model in pool.adapters.listed().items() if model.replicas}


async def probed(engine: FakeEngine, times: int = 3) -> None:
    """Wait until the engine was probed a few times more; the last probe may not be evaluated yet."""
    before = len(engine.probes)
    await until(lambda: len(engine.probes) >= before + times)


async def test_adapters_are_asked_for_when_their_revision_changes() -> None:
    source, engine = Told(), with_adapters(RED)
    with served(engine) as url:
        async with pool_of(source) as (pool, _, _):
            source.say(url)
            await until(lambda: known(pool) == {"red": RED.digest})
            await probed(engine, 5)
            assert engine.asked_for_adapters == 1
            engine.adapters["blue"] = BLUE
            await until(lambda: known(pool) == {"red": RED.digest, "blue": BLUE.digest})
            del engine.adapters["red"]
            await until(lambda: known(pool) == {"blue": BLUE.digest})
            await probed(engine)
            assert engine.asked_for_adapters == 3


async def test_an_engine_whose_list_could_not_be_read_is_asked_again() -> None:
    source, engine = Told(), with_adapters(RED)
    engine.faults.adapter_lists = 3
    with served(engine) as url:
        async with pool_of(source) as (pool, _, _):
            source.say(url)
            await until(lambda: known(pool) == {"red": RED.digest})
            replica = pool.model("fake").replicas[0]
            engine.faults.adapter_lists = 1
            pool.adapters.listed()["red"].lacks(replica)  # the revision stays the same
            assert known(pool) == {}
            await until(lambda: known(pool) == {"red": RED.digest})
            assert engine.asked_for_adapters == 6


async def test_an_adapter_is_forgotten_when_its_only_engine_comes_back_without_it() -> None:
    source, engine = Told(), with_adapters(RED)
    with served(engine) as url:
        async with pool_of(source) as (pool, _, telemetry):
            source.say(url)
            await until(lambda: known(pool) == {"red": RED.digest})
            engine.ready = False
            await until(lambda: engines_ready(telemetry) == 0)
            assert pool.model("fake").adapters, "it may come back"
            del engine.adapters["red"]
            engine.ready = True
            await until(lambda: not pool.model("fake").adapters)


async def test_changes_at_any_time_are_noticed() -> None:
    """An adapter may be loaded between the probe and the answer that lists adapters, and while that is evaluated."""
    source, engine = Told(), with_adapters()
    with served(engine) as url:
        async with pool_of(source, probe_seconds=0.002) as (pool, _, telemetry):
            source.say(url)
            await until(lambda: engines_ready(telemetry) == 1)
            for _ in range(10):
                for _ in range(5):
                    engine.adapters["red"] = adapter(f"{random.getrandbits(64):016x}", "red")
                    await asyncio.sleep(random.random() * 0.006)
                await until(lambda: known(pool) == {"red": engine.adapters["red"].digest})


async def test_engines_are_probed_at_different_times() -> None:
    source, engines = Told(), [FakeEngine() for _ in range(PHASES // 2 + 1)]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine)) for engine in engines]
        async with pool_of(source, probe_seconds=0.4) as (_, _, telemetry):
            source.say(*urls)
            await until(lambda: engines_ready(telemetry) == len(engines))
            one, two = engines[0].probes, engines[-1].probes  # half an interval apart
            # in the first of the rounds that the machine does not disturb
            await until(lambda: any(min(abs(first - second) for first in one) > 0.1 for second in two[1:-1]))
