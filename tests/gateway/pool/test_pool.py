"""Replicas that discovery finds, drains and loses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest

from tests.fakes import FakeEngine, served
from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import ModelNotFound, NotReady
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.discovery import Endpoint, Source
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import Replica, ServedModel
from yardstick_llm.gateway.workers.workers import Capacity, Workers


class Told:
    """A source whose endpoints a test sets."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[Sequence[Endpoint]] = asyncio.Queue()

    def say(self, *urls: str, draining: Sequence[str] = ()) -> None:
        self._news.put_nowait([Endpoint(url, url in draining) for url in urls])

    async def follow(self) -> Source:
        while True:
            yield await self._news.get()


@asynccontextmanager
async def pool_of(
    *sources: Told,
    probe_seconds: float = 0.02,
    silence_seconds: float = 5,
    startup_seconds: float = 60,
) -> AsyncIterator[tuple[Pool, Dispatcher, Telemetry]]:
    telemetry = Telemetry()
    workers = Workers(Capacity(workers=1, job_mib=512, max_jobs=10, max_bytes=1 << 20), telemetry)

    def connect(url: str, entry: str) -> Replica:
        return Replica(EngineClient(url, connect_seconds=1, engine_seconds=5), entry)

    pool = Pool(
        {str(place): source.follow() for place, source in enumerate(sources)},
        connect,
        telemetry,
        workers,
        probe_seconds=probe_seconds,
        silence_seconds=silence_seconds,
        startup_seconds=startup_seconds,
    )
    workers.start()
    pool.start()
    try:
        yield pool, Dispatcher(telemetry, wait_seconds=5, max_waiting=10), telemetry
    finally:
        await pool.stop()
        await workers.stop()


def engines_ready(telemetry: Telemetry) -> int:
    return int(float(b"".join(telemetry.exposition()).decode().split("\nyardstick_engines_ready ")[1].split()[0]))


async def score(pool: Pool, dispatcher: Dispatcher, name: str | None = None) -> wire.Scored:
    return await score_with(pool.model(name), dispatcher)


async def score_with(model: ServedModel, dispatcher: Dispatcher) -> wire.Scored:
    request = wire.Score(uuid.uuid4().hex, [1], [[2]], wire.Labels([3]))
    return await dispatcher.call(model, lambda replica, _: replica.client.score(request), tokens=2)


async def test_replicas_come_and_go() -> None:
    source, first, second = Told(), FakeEngine(), FakeEngine()
    with served(first) as one, served(second) as two:
        async with pool_of(source) as (pool, dispatcher, telemetry):
            with pytest.raises(NotReady):
                pool.model("fake")
            source.say(one)
            await until(lambda: engines_ready(telemetry) == 1)
            source.say(one, two)
            await until(lambda: engines_ready(telemetry) == 2)
            source.say(two)
            await until(lambda: engines_ready(telemetry) == 1)
            for _ in range(5):
                await score(pool, dispatcher)
            assert (len(first.scores), len(second.scores)) == (0, 5)
            assert one not in b"".join(telemetry.exposition()).decode(), "the metrics no longer name an engine that is gone"


@pytest.mark.parametrize("how", ["draining", "gone", "not ready"])
async def test_running_work_finishes(how: str) -> None:
    source, leaving, staying = Told(), FakeEngine(), FakeEngine()
    with ExitStack() as stack:
        one, two = (stack.enter_context(served(engine)) for engine in (leaving, staying))
        async with pool_of(source) as (pool, dispatcher, telemetry):
            source.say(one)
            await until(lambda: engines_ready(telemetry) == 1)
            leaving.faults.delay = 2.0  # longer than a busy machine takes for what follows
            running = asyncio.create_task(score(pool, dispatcher))
            await until(lambda: bool(leaving.scores))
            if how == "not ready":
                leaving.ready = False
                source.say(one, two)
            else:
                source.say(*([one, two] if how == "draining" else [two]), draining=[one])
            await until(lambda: [replica.client.url for replica in pool.model("fake").ready] == [two])
            for _ in range(5):
                await score(pool, dispatcher)
            assert (len(leaving.scores), len(staying.scores)) == (1, 5)
            assert not running.done()
            await running
            assert leaving.left == []


async def test_the_last_engines_of_a_version_answer_requests_that_were_made_for_it() -> None:
    """A request is tokenised for a version. When it is sent, the version's engines have begun to terminate, for another version."""
    source, old, new = Told(), FakeEngine(fingerprint="old"), FakeEngine(fingerprint="new")
    with served(old) as one, served(new) as two:
        async with pool_of(source) as (pool, dispatcher, telemetry):
            source.say(one)
            await until(lambda: engines_ready(telemetry) == 1)
            model = pool.model("fake")
            source.say(one, two, draining=[one])
            await until(lambda: pool.model("fake").info.fingerprint == "new")
            assert not model.ready
            async with asyncio.timeout(2):
                await score_with(model, dispatcher)
            assert (len(old.scores), len(new.scores)) == (1, 0)
            await score(pool, dispatcher)
            assert (len(old.scores), len(new.scores)) == (1, 1), "later requests are made for the other version"
            old.ready = False
            await until(lambda: model.leaving is None)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):  # it waits
                    await score_with(model, dispatcher)


async def test_a_model_is_remembered_while_its_engines_are_away() -> None:
    source, engine, other = Told(), FakeEngine(), FakeEngine(model="other", fingerprint="2")
    with served(engine) as one, served(other) as two:
        async with pool_of(source) as (pool, dispatcher, telemetry):
            source.say(one)
            await until(lambda: engines_ready(telemetry) == 1)
            source.say()
            await until(lambda: engines_ready(telemetry) == 0)
            assert [model.name for model in pool.models] == ["fake"]
            waiting = asyncio.create_task(score(pool, dispatcher))
            await asyncio.sleep(0.05)
            source.say(one)
            await waiting
            source.say(two)
            await until(lambda: [model.name for model in pool.models] == ["other"])
            with pytest.raises(ModelNotFound):
                pool.model("fake")
