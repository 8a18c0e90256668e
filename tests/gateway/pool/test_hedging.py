"""Late scores are sent to a second replica: one answer counts, nothing is left behind, and budget and room bound it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest

from tests.fakes import FakeEngine, Faults, Running, logprobs_after, stop
from tests.prefixes import PrefixCache
from tests.processes import until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, Overloaded
from yardstick_llm.gateway.limits.limiter import Lease, Limits
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import Stage
from yardstick_llm.gateway.pool import hedging
from yardstick_llm.gateway.pool.client import EngineClient
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.fanout import FanOut, Prompts
from yardstick_llm.gateway.pool.hedging import MIN_ANSWERS, Hedge, Quantile, _Model, _SizeClass, size_class
from yardstick_llm.gateway.pool.replica import Health, Replica, ServedModel

MESSAGE = wire.Score("", [1] * 30, [[2], [3]], wire.Labels([4, 5]))
TOKENS = 32
SIZE = size_class(MESSAGE, TOKENS)


@dataclass
class Fleet:
    """Fake engines on real sockets, and the gateway's side of them."""

    engines: list[FakeEngine]
    model: ServedModel
    telemetry: Telemetry
    dispatcher: Dispatcher

    @property
    def hedges(self) -> _Model:
        assert self.dispatcher._hedger is not None
        return self.dispatcher._hedger._models[self.model]

    @property
    def replicas(self) -> list[Replica]:
        return self.model.replicas

    async def score(self) -> wire.Scored:

        async def ask(replica: Replica, _: Stage | None) -> wire.Scored:
            return await replica.client.score(MESSAGE)

        return await self.dispatcher.call(self.model, ask, tokens=TOKENS, preferred=self.replicas[0], hedge=Hedge(SIZE, ask))

    async def race(self) -> asyncio.Task[wire.Scored]:
        """Return a request that two replicas hold."""
        for engine in self.engines:
            engine.faults.hold = True
        asking = asyncio.create_task(self.score())
        await until(lambda: self.engines[0].running and self.engines[1].running)
        return asking

    def counts(self) -> dict[str, float]:
        """Metrics of hedges that are not zero, by their last label."""
        lines = b"".join(self.telemetry.exposition()).decode().splitlines()
        return {line.split('"')[-2]: float(line.split()[-1]) for line in lines if line.startswith("yardstick_hedges")}

    def answered(self, size: int, seconds: float) -> None:
        """Let all replicas be known to answer requests of a size in ``seconds``."""
        known = self.hedges.sizes[size] = _SizeClass()
        assert self.dispatcher._hedger is not None
        for replica in self.replicas * MIN_ANSWERS:
            self.dispatcher._hedger._record(replica, known, seconds)

    def is_idle(self) -> bool:
        """Whether no request is counted or computed anywhere."""
        counted = any(replica.in_flight or replica.tokens or replica._waits for replica in self.replicas)
        return not counted and not self.hedges.running and not any(engine.running for engine in self.engines)


SERVERS: list[tuple[FakeEngine, Running]] = []


@contextmanager
def served_fleet() -> Iterator[None]:
    """Serve four engines, which :func:`fleet` makes as new."""
    for _ in range(4):
        engine = FakeEngine()
        SERVERS.append((engine, Running(engine)))
    yield
    stop([server for _, server in SERVERS])
    SERVERS.clear()


@asynccontextmanager
async def fleet(count: int = 2, *, budget: float = 10_000, seconds: float = 0.01) -> AsyncIterator[Fleet]:
    """Replicas that are known to answer in ``seconds``."""
    engines, telemetry = [engine for engine, _ in SERVERS[:count]], Telemetry()
    clients = [EngineClient(server.url, connect_seconds=2, engine_seconds=20) for _, server in SERVERS[:count]]
    replicas = [Replica(client, ready=True, health=Health(seconds=60)) for client in clients]
    model = ServedModel(engines[0].info(), None, "", replicas)
    hedged = Fleet(engines, model, telemetry, Dispatcher(telemetry, wait_seconds=0, max_waiting=0, hedge_budget=0.02))
    assert hedged.dispatcher._hedger is not None
    hedged.dispatcher._hedger._models[model] = _Model(tokens=budget)
    hedged.answered(SIZE, seconds)
    try:
        yield hedged
    finally:
        for engine in engines:
            engine.faults.hold = engine.silent = False
        for client in clients:
            client.close()
        await until(lambda: not any(engine.running for engine in engines))
        for engine in engines:
            vars(engine).update(vars(FakeEngine()))


def let_fail(faults: Faults, *, garbage: bool = False) -> None:
    """End a request that an engine holds."""
    faults.garbage, faults.break_after = garbage, None if garbage else 0
    faults.hold = False


def row(engine: FakeEngine, prompt: list[int]) -> list[float]:
    return [logprobs_after(prompt, engine.vocab_size)[label] for label in (4, 5)]


def rows(engine: FakeEngine) -> list[list[float]]:
    return [row(engine, MESSAGE.prefix + branch) for branch in MESSAGE.branches]


@pytest.fixture(autouse=True, scope="module")
def engines() -> Iterator[None]:
    with served_fleet():
        yield


@pytest.mark.parametrize("fault", ["hold", "silent"])
async def test_the_second_replica_answers_for_a_stuck_one(fault: str) -> None:
    async with fleet() as hedged:
        stuck, other = hedged.engines
        stuck.silent, stuck.faults.hold = fault == "silent", fault == "hold"
        asking = asyncio.create_task(hedged.score())
        await until(asking.done)
        assert (await asking).rows == rows(other)
        assert hedged.counts() == {"won": 1}
        stuck.silent = False
        if fault == "hold":
            await until(lambda: len(stuck.left) == 1)  # its connection was closed
        await until(hedged.is_idle)
        assert hedged.replicas[0].health.failures == 1
        assert hedged.hedges.tokens == 10_000 - TOKENS


async def test_the_first_replica_may_win_and_the_hedge_is_aborted() -> None:
    async with fleet() as hedged:
        first, other = hedged.engines
        asking = await hedged.race()
        first.faults.hold = False
        assert (await asking).rows == rows(first)
        await until(lambda: len(other.left) == 1)
        await until(hedged.is_idle)
        assert hedged.counts() == {"lost": 1}
        assert [replica.health.failures for replica in hedged.replicas] == [0, 0]


async def test_an_answer_in_time_has_no_hedge() -> None:
    async with fleet(seconds=5) as hedged:
        await hedged.score()
        assert (hedged.engines[1].scores, hedged.counts()) == ([], {})
        assert hedged.hedges.tokens == pytest.approx(10_000 + 0.02 * TOKENS), "it has earned a part of its tokens"


async def test_the_error_of_a_hedge_fails_nothing() -> None:
    async with fleet() as hedged:
        first, other = hedged.engines
        asking = await hedged.race()
        let_fail(other.faults)
        await until(lambda: hedged.replicas[1].health.failures)
        first.faults.hold = False
        assert (await asking).rows == rows(first)
        assert hedged.counts() == {"failed": 1}
        assert hedged.replicas[0].health.failures == 0
        await until(hedged.is_idle)


async def test_a_hedge_answers_for_a_first_replica_that_fails() -> None:
    async with fleet() as hedged:
        first, other = hedged.engines
        asking = await hedged.race()
        let_fail(first.faults)
        await until(lambda: not hedged.replicas[0].in_flight)
        assert not asking.done()
        other.faults.hold = False
        assert (await asking).rows == rows(other)
        assert hedged.counts() == {"won": 1}
        assert [replica.health.failures for replica in hedged.replicas] == [1, 0]
        assert len(other.scores) == 1, "it was not sent again"
        await until(hedged.is_idle)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
async def test_both_may_fail(count: int, order: list[int]) -> None:
    """Then it is sent to a replica that had neither; without one the error of the first is the answer."""
    async with fleet(count) as hedged:
        for replica in hedged.replicas[2:]:
            replica.tokens = 1  # so that the hedge goes to the second
        asking = await hedged.race()
        for place in order:
            let_fail(hedged.engines[place].faults, garbage=place == 1)
            await until(lambda place=place: not hedged.engines[place].running)
        if count == 2:
            with pytest.raises(EngineLost, match="broke"):
                await asking
        else:
            hedged.engines[2].faults.hold = False
            assert (await asking).rows == rows(hedged.engines[2])
        assert [len(engine.scores) for engine in hedged.engines] == [1] * count
        assert hedged.counts() == {"failed": 1}
        assert hedged.hedges.running == 0


async def test_a_caller_that_leaves_ends_both() -> None:
    async with fleet() as hedged:
        asking = await hedged.race()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(hedged.is_idle)
        assert [len(engine.left) for engine in hedged.engines] == [1, 1]


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_caller_that_leaves_when_the_hedge_wins(turns: int) -> None:
    """It is cancelled just before or after the hedge's answer cancels its wait."""
    async with fleet() as hedged:
        hedged.engines[0].faults.hold = True
        loop = asyncio.get_running_loop()

        def leave(turns: int) -> None:
            if turns:
                loop.call_soon(leave, turns - 1)
            else:
                asking.cancel()

        async def ask(replica: Replica, _: Stage | None) -> wire.Scored:
            answer = await replica.client.score(MESSAGE)
            leave(turns)
            return answer

        first = hedged.replicas[0]
        calling = hedged.dispatcher.call(
            hedged.model, lambda replica, _: replica.client.score(MESSAGE), tokens=TOKENS, preferred=first, hedge=Hedge(SIZE, ask)
        )
        asking = asyncio.create_task(calling)
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(hedged.is_idle)


async def test_a_blocked_gateway_sends_no_hedge() -> None:
    """The answer arrives while the event loop is blocked, and is read before a hedge is sent."""
    async with fleet(seconds=0.2) as hedged:
        hedged.engines[0].faults.delay = 0.1
        asking = asyncio.create_task(hedged.score())
        await until(lambda: bool(hedged.engines[0].scores))
        time.sleep(0.5)  # noqa: ASYNC251  this is the test
        await asking
        assert hedged.counts() == {}


async def test_items_are_kept_where_they_belong_only() -> None:
    """The hedge of items leaves none in the other replica's cache, and pins none."""
    async with fleet() as hedged:
        for engine in hedged.engines:
            engine.prefixes = PrefixCache()
        fan_out = FanOut(hedged.dispatcher, hedged.telemetry, split_tokens=4096)
        prompts = Prompts([], [[7, place] * 10 for place in range(12)], wire.Labels([4, 5]), suffix=[9, 9])
        for tokens in (22, 32, 64, 128, 256):
            hedged.answered(1 << 5 | tokens.bit_length(), 0.2)
        hedged.engines[0].faults.hold = True
        found: dict[int, list[float]] = {}

        def take(places: list[int], scored: wire.Scored) -> None:
            assert not found.keys() & set(places), "each answer counts once"
            found.update(zip(places, scored.rows, strict=True))

        lease = Lease("k", "l", Limits(), None)
        await asyncio.wait_for(fan_out.run(hedged.model, prompts, prompts.branches, take, lease), 10)
        other = hedged.engines[1]
        assert [found[place] for place in range(12)] == [row(other, [*item, 9, 9]) for item in prompts.branches]
        own, hedge = sorted(other.item_scores, key=lambda message: not message.caller.keep_prefix)
        assert (own.caller.keep_prefix, hedge.caller.keep_prefix) == (True, False)
        kept = [item for item in prompts.branches if other.prefixes.match_and_insert(wire.Caller(), item) == len(item)]
        assert 0 < len(kept) == len(own.lengths) // 4 < 12, "none of the hedge's items was kept"
        assert lease.begun.requests == 1
        assert (lease.begun.items, lease.begun.tokens) == (12, 12 * 22), "a hedge is not charged"


@pytest.mark.parametrize(
    ("part", "field", "value", "counts"),
    [
        ("replica", "ready", False, {}),
        ("replica", "draining", True, {}),
        ("health", "returns", 0.0, {"saturation": 1}),
        ("replica", "tokens", TOKENS + 1, {"saturation": 1}),
        ("hedges", "tokens", TOKENS - 1, {"budget": 1}),
    ],
)
async def test_without_room_there_is_no_hedge(part: str, field: str, value: object, counts: dict[str, int]) -> None:
    async with fleet() as hedged:
        hedged.engines[0].faults.delay = 0.2
        parts = {"replica": hedged.replicas[1], "health": hedged.replicas[1].health, "hedges": hedged.hedges}
        setattr(parts[part], field, value)
        await hedged.score()
        assert hedged.engines[1].scores == []
        assert hedged.counts() == counts


@pytest.mark.slow
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


@pytest.mark.parametrize(("priority", "hedges"), [(1, 0), (0, 1)])
async def test_what_can_wait_has_no_hedge(priority: int, hedges: int) -> None:
    async with fleet() as hedged:
        fan_out = FanOut(hedged.dispatcher, hedged.telemetry, split_tokens=4096)
        for engine in hedged.engines:
            engine.faults.delay = 0.1
        prompts = Prompts(MESSAGE.prefix, MESSAGE.branches, MESSAGE.readout, priority=priority)
        await fan_out.run(hedged.model, prompts, prompts.branches, lambda *_: None, None)
        assert sum(len(engine.scores) for engine in hedged.engines) == 1 + hedges
        assert sum(hedged.counts().values()) == hedges


def test_the_quantile_follows_the_last_answers() -> None:
    quantile = Quantile()
    for seconds, count in ((5.0, 19), (1.0, 2000), (0.01, 3 * hedging.WINDOW)):
        for _ in range(count):
            quantile.add(seconds)
        if count < hedging.MIN_ANSWERS:
            assert quantile.value is None, "too few"
        else:
            assert seconds <= quantile.value <= 1.2 * seconds
