"""Replicas that discovery finds, probes, drains and loses."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes import FakeEngine, adapter, served
from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import NotReady
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.discovery import Endpoint, Source, resolved
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.pool import PHASES, Pool
from yardstick_llm.gateway.pool.replica import Replica, ServedModel
from yardstick_llm.gateway.workers.workers import Capacity, Workers


@dataclass
class Pooled:
    """A pool before served engines, and a source whose endpoints a test sets."""

    pool: Pool
    dispatcher: Dispatcher
    telemetry: Telemetry
    urls: list[str]
    news: asyncio.Queue[Sequence[Endpoint]]

    def say(self, *urls: str, draining: Sequence[str] = ()) -> None:
        self.news.put_nowait([Endpoint(url, url in draining) for url in urls])

    def metrics(self) -> str:
        return b"".join(self.telemetry.exposition()).decode()

    async def ready(self, count: int) -> None:
        """Wait until ``count`` engines are ready."""
        await until(lambda: float(self.metrics().split("\nyardstick_engines_ready ")[1].split()[0]) == count)

    async def score(self, name: str | None = None) -> wire.Scored:
        return await self.score_with(self.pool.model(name))

    async def score_with(self, model: ServedModel) -> wire.Scored:
        request = wire.Score(uuid.uuid4().hex, [1], [[2]], wire.Labels([3]))
        return await self.dispatcher.call(model, lambda replica, _: replica.client.score(request), tokens=2)


@asynccontextmanager
async def pool_of(
    *engines: FakeEngine, probe_seconds: float = 0.02, silence_seconds: float = 5, startup_seconds: float = 60
) -> AsyncIterator[Pooled]:
    telemetry, news = Telemetry(), asyncio.Queue[Sequence[Endpoint]]()
    workers = Workers(Capacity(workers=1, job_mib=512, max_jobs=10, max_bytes=1 << 20), telemetry)

    def connect(url: str, entry: str) -> Replica:
        return Replica(EngineClient(url, connect_seconds=1, engine_seconds=5), entry)

    async def follow() -> Source:
        while True:
            yield await news.get()

    pool = Pool(
        {"0": follow()},
        connect,
        telemetry,
        workers,
        probe_seconds=probe_seconds,
        silence_seconds=silence_seconds,
        startup_seconds=startup_seconds,
    )
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine)) for engine in engines]
        workers.start()
        pool.start()
        try:
            yield Pooled(pool, Dispatcher(telemetry, wait_seconds=5, max_waiting=10), telemetry, urls, news)
        finally:
            await pool.stop()
            await workers.stop()


async def test_replicas_come_and_go() -> None:
    first, second = FakeEngine(), FakeEngine()
    async with pool_of(first, second) as pooled:
        one, two = pooled.urls
        with pytest.raises(NotReady):
            pooled.pool.model("fake")
        for urls in ([one], [one, two], [two]):
            pooled.say(*urls)
            await pooled.ready(len(urls))
        for _ in range(5):
            await pooled.score()
        assert (len(first.scores), len(second.scores)) == (0, 5)
        assert one not in pooled.metrics(), "the metrics no longer name an engine that is gone"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["draining", "gone", "not ready"])
async def test_running_work_finishes(how: str) -> None:
    leaving, staying = FakeEngine(), FakeEngine()
    async with pool_of(leaving, staying) as pooled:
        one, two = pooled.urls
        pooled.say(one)
        await pooled.ready(1)
        leaving.faults.hold = True
        running = asyncio.create_task(pooled.score())
        await until(lambda: bool(leaving.scores))
        if how == "not ready":
            leaving.ready = False
            pooled.say(one, two)
        else:
            pooled.say(*([one, two] if how == "draining" else [two]), draining=[one])
        await until(lambda: [replica.client.url for replica in pooled.pool.model("fake").ready] == [two])
        for _ in range(5):
            await pooled.score()
        assert (len(leaving.scores), len(staying.scores)) == (1, 5)
        assert not running.done()
        leaving.faults.hold = False
        await running
        assert leaving.left == []


async def test_the_last_engines_of_a_version_answer_requests_that_were_made_for_it() -> None:
    """A request is tokenised for a version. When it is sent, the version's engines have begun to terminate, for another version."""
    old, new = FakeEngine(fingerprint="old"), FakeEngine(fingerprint="new")
    async with pool_of(old, new) as pooled:
        one, two = pooled.urls
        pooled.say(one)
        await pooled.ready(1)
        model = pooled.pool.model("fake")
        pooled.say(one, two, draining=[one])
        await until(lambda: pooled.pool.model("fake").info.fingerprint == "new")
        assert not model.ready
        async with asyncio.timeout(2):
            await pooled.score_with(model)
        assert (len(old.scores), len(new.scores)) == (1, 0)
        await pooled.score()
        assert (len(old.scores), len(new.scores)) == (1, 1), "later requests are made for the other version"
        old.ready = False
        await until(lambda: model.leaving is None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):  # it waits
                await pooled.score_with(model)


RED, BLUE = adapter("aa11", "red"), adapter("bb22", "blue")


def with_adapters(*adapters: wire.Adapter) -> FakeEngine:
    return FakeEngine(adapters={each.name: each for each in adapters})


def known(pool: Pool) -> dict[str, str]:
    """Name and digest of the adapters that some replica has."""
    return {name: model.adapter.digest for name, model in pool.adapters.listed().items() if model.replicas}


async def probed(engine: FakeEngine, times: int = 3) -> None:
    """Wait until the engine was probed a few times more; the last probe may not be evaluated yet."""
    before = len(engine.probes)
    await until(lambda: len(engine.probes) >= before + times)


async def test_adapters_are_asked_for_when_their_revision_changes() -> None:
    async with pool_of(engine := with_adapters(RED)) as pooled:
        pooled.say(*pooled.urls)
        await until(lambda: known(pooled.pool) == {"red": RED.digest})
        await probed(engine, 5)
        assert engine.asked_for_adapters == 1
        engine.adapters["blue"] = BLUE
        await until(lambda: known(pooled.pool) == {"red": RED.digest, "blue": BLUE.digest})
        del engine.adapters["red"]
        await until(lambda: known(pooled.pool) == {"blue": BLUE.digest})
        await probed(engine)
        assert engine.asked_for_adapters == 3


async def test_an_engine_whose_list_could_not_be_read_is_asked_again() -> None:
    engine = with_adapters(RED)
    engine.faults.adapter_lists = 3
    async with pool_of(engine) as pooled:
        pooled.say(*pooled.urls)
        await until(lambda: known(pooled.pool) == {"red": RED.digest})
        replica = pooled.pool.model("fake").replicas[0]
        engine.faults.adapter_lists = 1
        pooled.pool.adapters.listed()["red"].lacks(replica)  # the revision stays the same
        assert known(pooled.pool) == {}
        await until(lambda: known(pooled.pool) == {"red": RED.digest})
        assert engine.asked_for_adapters == 6


async def test_an_adapter_is_forgotten_when_its_only_engine_comes_back_without_it() -> None:
    async with pool_of(engine := with_adapters(RED)) as pooled:
        pooled.say(*pooled.urls)
        await until(lambda: known(pooled.pool) == {"red": RED.digest})
        engine.ready = False
        await pooled.ready(0)
        assert pooled.pool.model("fake").adapters, "it may come back"
        del engine.adapters["red"]
        engine.ready = True
        await until(lambda: not pooled.pool.model("fake").adapters)


async def test_changes_at_any_time_are_noticed() -> None:
    """An adapter may be loaded between the probe and the answer that lists adapters, and while that is evaluated."""
    async with pool_of(engine := with_adapters(), probe_seconds=0.002) as pooled:
        pooled.say(*pooled.urls)
        await pooled.ready(1)
        for _ in range(10):
            for _ in range(5):
                engine.adapters["red"] = adapter(f"{random.getrandbits(64):016x}", "red")
                await asyncio.sleep(random.random() * 0.006)
            await until(lambda: known(pooled.pool) == {"red": engine.adapters["red"].digest})


async def test_engines_are_probed_at_different_times() -> None:
    engines = [FakeEngine() for _ in range(PHASES // 2 + 1)]
    async with pool_of(*engines, probe_seconds=0.4) as pooled:
        pooled.say(*pooled.urls)
        await pooled.ready(len(engines))
        one, two = engines[0].probes, engines[-1].probes  # half an interval apart
        # in the first of the rounds that the machine does not disturb
        await until(lambda: any(min(abs(first - second) for first in one) > 0.1 for second in two[1:-1]))


async def test_names_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | None] = [None, ["10.0.0.2", "10.0.0.1", "fd00::1"], ["10.0.0.2"], None, ["10.0.0.2"], ["10.0.0.3"]]

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if addresses is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    async with following(resolved("engines", 8100, resolve_seconds=0.01)) as seen:
        await until(lambda: len(seen) == 3)
    assert [[endpoint.url for endpoint in found] for found in seen] == [
        ["http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://[fd00::1]:8100"],
        ["http://10.0.0.2:8100"],
        ["http://10.0.0.3:8100"],
    ]


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[list[Sequence[Endpoint]]]:
    """Collect the endpoints that ``source`` yields, in a list that grows."""
    seen: list[Sequence[Endpoint]] = []

    async def follow() -> None:
        async with aclosing(source) as answers:
            async for found in answers:
                seen.append(found)

    task = asyncio.create_task(follow())
    try:
        yield seen
        assert not task.done(), "it gave up"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
def test_the_client_of_kubernetes_is_imported_for_services_only() -> None:
    """Importing it takes half a second, and hosts that only run benchmarks lack it."""
    program = "import sys; import yardstick_llm.gateway.app; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
